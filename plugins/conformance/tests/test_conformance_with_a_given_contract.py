"""A contract is checked before a kernel is blamed, and may draw its samples in its own way."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_core import KernelSpec, OpSpec
from veomni_core.errors import ContractError
from veomni_ops.contract import Contract, Sample, Tolerance


def _twice(x):
    return 2 * x


def _fails(x):
    raise RuntimeError("no such operator")


def _one_sample(device, dtype):
    yield Sample("two numbers", (torch.ones(2, device=device, dtype=dtype, requires_grad=True),))


def _too_many_arguments(device, dtype):
    yield Sample("two arguments", (torch.ones(2), torch.ones(2)))


def _broken_samples(device, dtype):
    yield from _one_sample(device, dtype)
    raise IndexError("no third number")


def _contracts(reference=_twice, samples=_one_sample, dtype="float32", **options):
    exact = {dtype: Tolerance(1e-6, 1e-6)}
    return {"standard": Contract("twice", "standard", reference, samples, exact, exact, **options)}


FAILING_CONTRACTS = {
    "the reference fails on its own sample 'two numbers': RuntimeError: no such operator": _contracts(_fails),
    "the reference fails on its own sample 'two arguments': TypeError": _contracts(samples=_too_many_arguments),
    "its samples fail in float32: IndexError: no third number": _contracts(samples=_broken_samples),
    "has no tolerance of values in float32": _contracts(dtype="bfloat16"),
    "it has a range for 'y', no parameter of its reference. Known: x.": _contracts(ranges={"y": (0.0, 1.0)}),
}
right_contracts = _contracts()


@pytest.mark.parametrize("message", FAILING_CONTRACTS)
def test_a_contract_that_fails_is_no_fault_of_the_kernel(message, monkeypatch):
    monkeypatch.setitem(globals(), "right_contracts", FAILING_CONTRACTS[message])
    op = OpSpec(
        name="twice",
        variants=("standard",),
        config_field="twice_implementation",
        contract=f"{__name__}:right_contracts",
    )
    with pytest.raises(ContractError, match=re.escape(message)):
        check_kernel(KernelSpec("twice", "twice", "standard", f"{__name__}:_twice"), op=op)


def _twice_if_contiguous(x):
    return 2 * x if x.is_contiguous() else x


def test_a_sample_that_is_laid_out_before_calls_is_not_kept_so(monkeypatch):
    kept = []

    def apart(sample):
        kept.append(sample.args[0].is_contiguous())
        wide = torch.zeros(2, 3).copy_(sample.args[0].detach()[:, None])
        return replace(sample, args=(wide[:, 1].requires_grad_(),))

    def samples(device, dtype):
        yield replace(next(_one_sample(device, dtype)), laid_out=apart)

    monkeypatch.setitem(globals(), "right_contracts", _contracts(samples=samples))
    contract = f"{__name__}:right_contracts"
    op = OpSpec(name="twice", variants=("standard",), config_field="twice_implementation", contract=contract)
    right, wrong = (
        check_kernel(KernelSpec("twice", "twice", "standard", f"{__name__}:{name}"), op=op)
        for name in ("_twice", "_twice_if_contiguous")
    )
    assert right.ok and not wrong.ok and set(kept) == {True}


def test_a_contract_that_draws_in_its_own_way_is_asked_the_same():
    op = OpSpec(
        name="twice",
        variants=("standard",),
        config_field="twice_implementation",
        contract=f"{__name__}:right_contracts",
    )
    report = check_kernel(KernelSpec("twice", "twice", "standard", f"{__name__}:_twice"), op=op)
    report.raise_if_failed()
    assert report.skipped == ("large samples",)
