"""Compares the log-probabilities of what a model has drawn with those that training computes of the same tokens.

While completions are drawn, a hook keeps what the output projection is given for each token. The function that scores
tokens in training then scores these too. So a difference is that of two forwards: token by token with a cache, and in
training. Weights have not changed between the two.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from veomni_core import binding_of
from veomni_core.errors import ConformanceError
from veomni_trainer.job.method_packages import require_trl
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.output.metrics import Row

require_trl(__name__)

from veomni_bridges.trl_heads import fused_forward, scores_of  # noqa: E402

_logger = logging.getLogger(__name__)
SCORES = "rollout_logps"  # by which a batch has the log-probabilities of its rollout
MEAN, LARGEST = "rollout_difference/mean", "rollout_difference/largest"


def at_positions_of_generation(model: Any, **inputs: Any) -> Any:
    """The model's forward, at the positions at which tokens are generated: those of padding don't count.

    TRL leaves them out, and transformers' models then count padding too. That shifts all of a sequence's positions: the
    same distances, and other bits of their rotations.
    """
    mask: Tensor = inputs["attention_mask"]
    return model(**inputs, position_ids=(mask.cumsum(-1) - 1).clamp_min(0))


class RolloutParity(TrainerCallback):
    """The differences of a step's tokens, on all ranks; ends training, or warns, before weights change by such a step.

    Args:
        model: the model that is trained, with TRL's fused head.
        train: what the job says.
        reduce: sums or maximises a tensor over the ranks.

    Attributes:
        takes_positions: whether the model's forward can be given the positions of generation.

    Raises:
        ConformanceError: ``train.parity: stop``, and a difference is above the limit: 0 where the plan requires
            ``batch_invariant``, else ``train.parity_limit``. All ranks raise it.
    """

    def __init__(self, model: nn.Module, train: TrainSection, reduce: Callable[[Tensor, str], Tensor]) -> None:
        self._head: Any = next(each for each in model.modules() if fused_forward(each) is not None)
        binding = binding_of(self._head) or binding_of(model)
        self._promised = binding is not None and "batch_invariant" in binding.plan.require
        self._limit, self._stops = 0.0 if self._promised else train.parity_limit, train.parity == "stop"
        # Models of pictures count three rows of positions, by themselves.
        takes = "position_ids" in inspect.signature(type(self._head).forward).parameters
        self.takes_positions = takes and not hasattr(self._head.config, "vision_config")
        self._reduce, self._warned = reduce, False
        self._hidden: list[Tensor] = []
        self._step: list[Tensor] = []  # of each micro-step [sum, tokens, largest]
        self._rows: list[Row] = []

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Keep what the output projection is given for each token that is drawn in this context."""
        self._hidden.clear()
        head = self._head.get_output_embeddings()
        handle = RemovableHandle(head._forward_pre_hooks)  # as veomni_transformers.packed.module_outputs does
        head._forward_pre_hooks[handle.id] = lambda _, args: self._hidden.append(args[0][:, -1].detach())
        try:
            yield
        finally:
            handle.remove()

    def scores(self, completions: Tensor) -> Tensor:
        """The log-probabilities of the ``completions[B, T]`` that were drawn last, as float32."""
        hidden = torch.stack(self._hidden[: completions.shape[1]], 1)
        self._hidden.clear()
        with torch.no_grad():
            return scores_of(self._head, hidden, completions)

    def compare(self, drawn: Tensor, trained: Tensor, mask: Tensor) -> None:
        """Take the log-probabilities ``[B, T]`` of a micro-step where ``mask`` is not 0."""
        counts = mask != 0
        off = torch.where(counts, (drawn.double() - trained.detach().double()).abs(), 0.0)
        self._step.append(torch.stack([off.sum(), counts.sum().double(), off.max()]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._step:
            return
        micro = torch.stack(self._step)
        total, largest = self._reduce(micro[:, :2].sum(0), "sum"), float(self._reduce(micro[:, 2].max(), "max"))
        self._step = []
        mean = float(total[0] / total[1].clamp_min(1))
        self._rows.append({MEAN: mean, LARGEST: largest})
        if largest <= self._limit:  # not of a NaN
            return
        why = (
            f"step {state.global_step + 1}: log-probabilities in training differ from those of the rollout by "
            f"{mean:.3g} on average and {largest:.3g} at most, and "
            + (
                "the plan requires batch_invariant, which leaves no difference: veomni parity JOB.yaml names the first "
                "module that differs"
                if self._promised
                else f"train.parity_limit is {self._limit:g}: raise it, or require batch_invariant kernels"
            )
        )
        if self._stops:
            raise ConformanceError(why)
        if not self._warned:
            _logger.warning(why)
        self._warned = True

    def row(self) -> Row:
        """The mean difference since the last row, and the largest."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        return {MEAN: sum(each[MEAN] for each in rows) / len(rows), LARGEST: max(each[LARGEST] for each in rows)}
