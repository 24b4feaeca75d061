"""token_logprobs/causal sites: language models whose logits are an output projection's, perhaps scaled and capped.

A model's own forward never asks for log-probabilities: :func:`veomni_core.token_logprobs` does, and trainers of policy
losses. So the field is on request, and a bound head runs its own code until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.changes.change_set import ChangeSet
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.kernels import IGNORED
from veomni_core.sites.site import Kernel, Site
from veomni_ops.token_logprobs import CONTRACTS, ENTROPY, LOGPROBS
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.engine.layout import refused
from veomni_transformers.forwards.fused_head import why_not_plain
from veomni_transformers.forwards.logprobs_head import Scores, logprobs_head_forward, score
from veomni_transformers.losses.head_twin import VOCABULARY, decoder_width, head_twin
from veomni_transformers.losses.language_models import ReadsLosses, language_models
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import current_forward
from veomni_transformers.proving.proof import Proof

_OUTPUTS = (LOGPROBS, ENTROPY)
_TEMPERATURE = 0.7  # arbitrary; not 1, so that an operator between head and temperature shows


class TokenLogprobs(ReadsLosses):
    """Finds models with an output projection, and lets the kernel compute log-probabilities from its inputs."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        for each in language_models(model):
            proof = replace(_prove(each.module, each.head), detail={"head": each.name_of_head})
            dtype = probe.parameter_dtype(each.head)
            yield proof.site("token_logprobs", each.path, rule, dtype=dtype, sizes=each.sizes)

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """Each rank would have the words' part of a sum; no kernel is given that yet."""
        styles = layout.styles_at(f"{site.path}.{site.detail['head']}".lstrip("."))
        return refused(site, styles, "the kernel needs every word of the vocabulary") if styles else site

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        yield _change(model.get_submodule(site.path), kernel)

    def run(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """The log-probabilities and entropies of the call's labels, or of its tokens."""
        kwargs.pop("labels", None)
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        return score(
            lambda: module(*args, **kwargs),
            ids[:, 1:],
            temperature=_TEMPERATURE,
            ignore_index=IGNORED,
            outputs=_OUTPUTS,
        ).results


def _change(module: Any, kernel: Kernel) -> Change:
    head = module.get_output_embeddings()
    return ForwardChange(head, logprobs_head_forward(current_forward(head), kernel))


def _prove(model: Any, head: Any) -> Proof:
    """Run the model's own code between head and logits over a placeholder for its decoder, unbound and then bound."""
    if why_not := why_not_plain(head):
        return Proof(None, why_not)
    with probe.seeded():
        hidden = probe.random(2, 5, decoder_width(model, head)).requires_grad_()
        built, why_not = probe.attempt(lambda: head_twin(model, head, hidden))
        if why_not:
            return Proof(None, why_not)
        twin, twin_head = built
        ids = torch.randint(VOCABULARY, (2, 5), generator=probe.generator())
        why_not = _mismatch(twin, twin_head, hidden, ids)
    evidence = "its own head, run without the decoder, gave the reference's log-probabilities and gradients"
    return Proof(None, why_not) if why_not else Proof("causal", evidence)


def _mismatch(twin: Any, twin_head: nn.Module, hidden: Tensor, ids: Tensor) -> str:
    def run() -> Scores:
        return score(
            lambda: twin.forward(input_ids=ids), ids, temperature=_TEMPERATURE, ignore_index=IGNORED, outputs=_OUTPUTS
        )

    numbers = probe.OwnNumbersWhileDrawn()
    with numbers.run():
        eager, why_not = probe.attempt(run)
    if why_not:
        return why_not
    changes = ChangeSet()

    def run_bound() -> Scores:
        changes.apply(_change(twin, CONTRACTS["causal"].reference))
        return run()

    with numbers.run():
        fused, why_not = probe.attempt(run_bound)
    changes.revert()
    why_not = why_not or fused.why_not
    if why_not:
        return f"with its logits deferred: {why_not}"
    for name, found, wanted in zip(_OUTPUTS, fused.results, eager.results, strict=True):
        if not probe.close(found, wanted):
            return f"its {name} misses causal by {probe.largest_miss(found, wanted):.1%}"
        if not probe.gradients_close(found, wanted, (hidden, *twin_head.parameters())):
            return f"the gradients of its {name} differ"
    return ""
