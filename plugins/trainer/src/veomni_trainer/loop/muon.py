"""Muon for a model's hidden matrices and AdamW for its other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


def hidden_matrices(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters that Muon optimizes: those of two dimensions that are neither embeddings nor the head.

    Norms and biases have one dimension, and all experts of a layer that lie in one tensor have three.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outside = {
        id(weight) for module in [*tables, *([head] if head is not None else [])] for weight in module.parameters()
    }
    return frozenset(id(weight) for weight in model.parameters() if weight.ndim == 2 and id(weight) not in outside)


class MuonWithAdamW(Optimizer):
    """torch's ``Muon`` on the hidden matrices, and torch's ``AdamW`` on the rest.

    Both read this optimizer's groups and write into its state, so schedules and checkpoints treat it as one optimizer.
    Each group says in ``algorithm`` which of the two has it.

    Args:
        groups: parameters with their weight decay, as ``Trainer`` groups them.
        lr: the learning rate of both.
        matrices: the ids of the parameters that Muon optimizes.
        momentum: Muon's.
        nesterov: whether Muon's momentum is Nesterov's.
        ns_coefficients: of Muon's Newton-Schulz iteration.
        ns_steps: how many of those iterations a step takes.
        adjust_lr_fn: how Muon scales a matrix's update. By default like AdamW's, so that one
            learning rate fits both.
        betas: AdamW's.
        eps: AdamW's.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        matrices: Collection[int] = (),
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        hidden, others = [], []
        for group in params:
            hidden.append({**group, "params": [p for p in group["params"] if id(p) in matrices]})
            others.append({**group, "params": [p for p in group["params"] if id(p) not in matrices]})
        self._muon = Muon(
            hidden,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        self._adamw = AdamW(others, lr, betas=betas, eps=eps)
        groups = [group | {"algorithm": "muon"} for group in self._muon.param_groups]
        groups += [group | {"algorithm": "adamw"} for group in self._adamw.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in (("muon", self._muon), ("adamw", self._adamw)):
            # Anew in each step: loading a checkpoint replaces groups and state, and a job's groups divide them further.
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.state = self.state
            part.step()
        return loss
