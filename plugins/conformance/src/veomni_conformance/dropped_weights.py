"""Checks the dropout of attention kernels that declare it.

Which weights were dropped is read off results whose values are the identity. The oracle drops the same ones, so that
values and gradients are compared as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from veomni_conformance.sample_tensors import to_float64, upstream_of
from veomni_conformance.situations import reveal
from veomni_conformance.subject import Outcome, Subject
from veomni_ops.contract import Sample

_STANDARD_ERRORS = 6  # of a share of thousands of weights


def check_dropped_weights(subject: Subject) -> Iterator[str]:
    """Compare values and gradients, which weights are dropped, and how many, in two calls and with one seed."""
    for sample in subject.contract.dropping(subject.device, subject.dtype):

        def problem(sample: Sample = sample) -> str | None:
            return _problem(subject, sample)

        yield from reveal(f"with {sample.name}", problem)


def _problem(subject: Subject, sample: Sample) -> str | None:
    rate, length = sample.kwargs["dropout"], sample.args[1].shape[2]
    torch.manual_seed(0)
    found = subject.outcome(sample)
    kept = (found.results[0] != 0).cpu()  # [B, S, H, L]
    exact, seen = _exact(subject, sample, kept)
    share, weights = float((seen & ~kept).sum() / seen.sum()), int(seen.sum())
    if abs(share - rate) > _STANDARD_ERRORS * (rate * (1 - rate) / weights) ** 0.5:
        return f"it drops {share:.1%} of the weights, {rate:.1%} are to be dropped"
    if problem := subject.problem(found, exact if subject.spec.backward else Outcome(exact.results)):
        return problem
    heads = kept.transpose(1, 2).reshape(-1, length * length)
    if len(heads.unique(dim=0)) < len(heads):
        return "it drops the same weights in two heads"
    if torch.equal((subject.call(sample)[0] != 0).cpu(), kept):
        return "it drops the same weights in each call"
    torch.manual_seed(0)
    if not torch.equal((subject.call(sample)[0] != 0).cpu(), kept):
        return "with one seed it drops other weights, as a checkpoint's second forward would"
    return None


def _exact(subject: Subject, sample: Sample, kept: Tensor) -> tuple[Outcome, Tensor]:
    """The oracle's results and gradients where only ``kept`` weights are; and which there are without dropout."""
    whole = to_float64(replace(sample, kwargs={}))
    inputs = subject.differentiable(whole)
    weights = subject.reference_results(whole)[0]  # [B, S, Hq, L]
    dropped = weights * kept / (1 - sample.kwargs["dropout"])
    upstream = upstream_of(dropped)  # [B, S, Hq, Dv]
    query, key = torch.autograd.grad(dropped, (inputs["query"], inputs["key"]), upstream)
    per_head = torch.einsum("bshl,bshd->bhld", dropped.detach(), upstream)
    value = per_head.unflatten(1, (-1, sample.args[0].num_key_value_groups)).sum(2)
    return Outcome((dropped.detach(),), {"query": query, "key": key, "value": value}), weights.detach() != 0
