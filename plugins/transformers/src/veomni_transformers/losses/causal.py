"""cross_entropy_loss/causal sites: language models whose loss is the cross entropy of an output projection's logits.

The fused kernel needs the hidden states and the head's weight, but a model passes only logits to its loss. So, in
training with labels, the bound head returns logits that are not computed yet, and a cross entropy of them calls the
kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.changes.change_set import ChangeSet
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.errors import BindingError
from veomni_core.kernels import IGNORED
from veomni_core.sites.site import Kernel, Site
from veomni_ops.cross_entropy_loss import CONTRACTS
from veomni_transformers.changes.instance_forward import InstanceForwardChange
from veomni_transformers.engine.engine_layout import EngineLayout, parts
from veomni_transformers.engine.layout import refused
from veomni_transformers.forwards.fused_head import FusedHead, why_not_plain
from veomni_transformers.losses.head_twin import VOCABULARY, decoder_width, head_twin
from veomni_transformers.losses.language_models import ReadsLosses, language_models
from veomni_transformers.losses.sharded_head import why_not_sharded_by_words
from veomni_transformers.proving import probe
from veomni_transformers.proving.code_reading import set_on_instance
from veomni_transformers.proving.functions import current_forward
from veomni_transformers.proving.proof import Proof

VOCABULARY_PARALLEL = "vocabulary_parallel"
_GATHERING = {"colwise_gather_output", "colwise_rep"}  # the engine's styles of a head that returns all logits


class CausalLosses(ReadsLosses):
    """Finds models with an output projection and labels, and fuses the projection with the loss."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        for each in language_models(model):
            proof = replace(_prove(each.module, each.head), detail={"head": each.name_of_head})
            dtype = probe.parameter_dtype(each.head)
            yield proof.site("cross_entropy_loss", each.path, rule, dtype=dtype, sizes=each.sizes)

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """With a divided vocabulary each rank computes its words' part of the loss, and the logits are not gathered."""
        head = f"{site.path}.{site.detail['head']}".lstrip(".")
        styles = layout.styles_at(head)
        if not styles:
            return site
        if styles.get("") not in _GATHERING:
            return refused(site, styles, "the loss needs a head whose words are divided, and whose output is gathered")
        words = parts(site.sizes["vocabulary"][0], layout.tp)
        return replace(site, variant=VOCABULARY_PARALLEL, sizes={**site.sizes, "vocabulary": words})

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        changes = _changes_of_a_shard if site.variant == VOCABULARY_PARALLEL else _changes
        return changes(model.get_submodule(site.path), kernel)


def _changes(module: Any, kernel: Kernel) -> Iterable[Change]:
    head, fused = module.get_output_embeddings(), FusedHead(kernel)
    yield ForwardChange(head, fused.head_forward(current_forward(head)))
    yield ForwardChange(module, fused.model_forward(current_forward(module)))


def _changes_of_a_shard(module: Any, kernel: Kernel) -> Iterable[Change]:
    head, fused = module.get_output_embeddings(), FusedHead(kernel)
    if why_not := why_not_sharded_by_words(head):
        raise BindingError(f"the plan is for an output projection whose words are divided, but here {why_not}")
    yield InstanceForwardChange(head, fused.sharded_head_forward(vars(head)["forward"]))
    yield ForwardChange(module, fused.model_forward(current_forward(module)))


def _prove(model: Any, head: Any) -> Proof:
    """Run the model's own head and loss over a placeholder for its decoder, unbound and then bound to the reference."""
    if why_not := set_on_instance(model) or why_not_plain(head):
        return Proof(None, why_not)
    with probe.seeded():
        hidden = probe.random(2, 5, decoder_width(model, head)).requires_grad_()
        built, why_not = probe.attempt(lambda: head_twin(model, head, hidden))
        if why_not:
            return Proof(None, why_not)
        labels = torch.randint(VOCABULARY, (2, 5), generator=probe.generator())
        labels[0, 3] = IGNORED
        twin, twin_head = built
        for options in _loss_options(model):
            why_not = _mismatch(twin, twin_head, hidden, labels, options)
            if why_not:
                return Proof(None, why_not)
    evidence = "its own head and loss, run without the decoder, gave the reference's loss and gradients"
    return Proof("causal", evidence)


def _loss_options(model: nn.Module) -> list[dict[str, Any]]:
    """The options that the loss is proven with: none, and ``num_items_in_batch`` where the forward has ``**kwargs``."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    counts_items = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [{}, {"num_items_in_batch": 3}] if counts_items else [{}]


def _mismatch(twin: Any, twin_head: nn.Module, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> str:
    run = partial(_loss_of, twin, input_ids=labels.clamp_min(0), labels=labels, **options)
    numbers = probe.OwnNumbersWhileDrawn()
    with numbers.run():
        eager, why_not = probe.attempt(run)
    if why_not:
        return why_not
    calls: list[int] = []
    reference = CONTRACTS["causal"].reference

    def counted(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(states.shape[0])
        return reference(states, *args, **kwargs)

    changes = ChangeSet()

    def run_bound() -> Tensor:
        for change in _changes(twin, counted):
            changes.apply(change)
        return run()

    with numbers.run():
        fused, why_not = probe.attempt(run_bound)
    changes.revert()
    if why_not:
        return f"with its logits deferred: {why_not}"
    if len(calls) != 1:
        return "something between its output projection and its loss needs the logits themselves"
    if not probe.close(fused.float(), eager.float()):
        return f"its loss misses causal by {probe.largest_miss(fused, eager):.1%}"
    if not probe.gradients_close(fused, eager, (hidden, *twin_head.parameters())):
        return "the gradients of its loss differ"
    return ""


def _loss_of(model: Any, **arguments: Any) -> Tensor:
    output = model.forward(**arguments)
    loss = output.loss if hasattr(output, "loss") else output[0]
    if not isinstance(loss, Tensor):
        raise TypeError(f"its loss is a {type(loss).__name__}, expected a tensor")
    return loss
