"""cross_entropy_loss/seq_cls sites: sequence classifiers with one label per sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from veomni_core.changes.change import AttributeChange, Change
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_core.sites.walk import named_modules
from veomni_ops.cross_entropy_loss import CONTRACTS
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.forwards.classification_loss import SINGLE_LABEL, single_label
from veomni_transformers.losses.language_models import ReadsLosses
from veomni_transformers.proving import probe
from veomni_transformers.proving.proof import Proof


class ClassificationLosses(ReadsLosses):
    """Finds sequence classifiers by their loss, and replaces it for one model."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        for path, module in named_modules(model):
            if getattr(module, "loss_type", None) == "ForSequenceClassification" and hasattr(module, "loss_function"):
                yield _prove(module.loss_function).site("cross_entropy_loss", path, rule)  # type: ignore[arg-type]

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """Every rank has the whole pooled logits."""
        return site

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module = model.get_submodule(site.path)
        yield AttributeChange(module, "_loss_function", single_label(module.loss_function, kernel))  # type: ignore[arg-type]


def _prove(loss_function: Callable[..., Any]) -> Proof:
    with probe.seeded(), probe.own_numbers():
        logits, labels = probe.random(6, 3).requires_grad_(), torch.randint(3, (6,), generator=probe.generator())
        config = SimpleNamespace(num_labels=3, problem_type=SINGLE_LABEL)
        found, why_not = probe.attempt(
            lambda: loss_function(logits=logits, labels=labels, pooled_logits=logits, config=config)
        )
        if why_not:
            return Proof(None, why_not)
        wanted = CONTRACTS["seq_cls"].reference(logits, labels)
        if probe.close(found, wanted) and probe.gradients_close(found, wanted, (logits,)):
            return Proof("seq_cls", "its loss function gave the reference's value and gradient")
    return Proof(None, f"its loss misses seq_cls by {probe.largest_miss(found, wanted):.1%}")
