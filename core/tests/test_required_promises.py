"""``require: batch_invariant`` and ``require: deterministic``: kernels that promise it, and what nobody promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counting_kernels import counting_registry
from models import build
from planned_norms import MLP, NORMS, chosen, kernel, plan, reasons, registry
from veomni_core import OpsConfig, Plan, bind
from veomni_core.errors import KernelUnavailableError, UnknownNameError

REGISTRY = registry(
    kernel("fast", preference=70, deterministic=False),
    kernel("fast", "offset", preference=70, batch_invariant=True),
    kernel("steady", preference=60, batch_invariant=True),
    kernel("steady", "offset", preference=60),
    kernel("other", op="swiglu_mlp", preference=60),
)


def planned(value="auto", require="batch_invariant", **more):
    return plan(value, (*NORMS, MLP), registry=REGISTRY, require=require, **more)


def test_auto_takes_only_kernels_that_promise_it_for_the_variant():
    assert chosen(planned()) == ["steady", "steady", "fast"]
    assert chosen(planned(require="deterministic")) == ["steady", "steady", "fast"]
    assert chosen(planned(require=["batch_invariant", "deterministic"])) == ["steady", "steady", "fast"]
    assert chosen(planned(require="nothing")) == chosen(planned(require=[])) == ["fast"] * 3


def test_the_fastest_in_a_profile_must_promise_it_too():
    times = {"rms_norm": {"fast": 0.1, "steady": 0.3, "eager": 0.2}}
    assert chosen(planned(profile=times)) == ["steady", "steady", "fast"]


def test_one_that_is_named_and_promises_it_nowhere_is_an_error_with_what_does():
    lacks = "swiglu_mlp_implementation: other can't run here: does not promise to be batch-invariant, as require asks. "
    with pytest.raises(KernelUnavailableError, match=f"{lacks}Usable: eager."):
        planned(swiglu_mlp_implementation="other")
    assert "is not known" not in planned(swiglu_mlp_implementation="other", require="deterministic").table()


def test_where_a_named_one_does_not_promise_it_the_next_or_the_models_own_code_runs():
    assert chosen(planned("fast")) == ["eager", "eager", "fast"]
    assert reasons(planned("fast"))[0] == "fast does not promise to be batch-invariant, as require asks"
    assert chosen(planned(["fast", "steady"])) == ["steady", "steady", "fast"]
    both = planned("fast", ["batch_invariant", "deterministic"])
    assert "batch-invariant, as require asks and does not promise to be deterministic, as" in reasons(both)[0]


def test_the_plan_says_what_is_promised_and_what_is_not_known():
    known = ("batch-invariant: the kernels at 1 sites promise it",)
    unknown = "not known to be batch-invariant: rms_norm:eager (2), swiglu_mlp:eager (1), code outside of sites"
    there = planned("fast")
    assert there.promises() == (*known, unknown) and unknown in " ".join(there.table().split())
    assert Plan.from_json(there.to_json()) == there
    assert planned(require="verified").promises() == planned(require="nothing").promises() == ()


def test_a_plan_is_not_believed_where_it_has_a_kernel_that_does_not_promise_it():
    there = replace(planned("fast", require="nothing"), require=("deterministic",))
    assert there.promises()[1].startswith("not known to be deterministic: rms_norm:fast (2), swiglu_mlp:eager (1)")


def test_the_receipt_takes_back_what_no_longer_runs():
    plugins = counting_registry("one")  # whose kernels promise to be deterministic
    model = build("llama")
    config = {"preset": "eager", "rms_norm_implementation": "one", "require": "deterministic"}
    with bind(model, config, registry=plugins) as binding:
        said = binding.receipt.to_dict()["promises"]
        assert said[0] == "deterministic: the kernels at 5 sites promise it" and "rms_norm" not in said[1]
        assert f"Required: {said[0]}" in binding.receipt.table()
        model.model.norm.forward = lambda hidden_states: hidden_states
        said = binding.receipt.to_dict()["promises"]
        assert said[0] == "deterministic: the kernels at 4 sites promise it" and "rms_norm:one (1)" in said[1]
        del model.model.norm.forward


@pytest.mark.parametrize(
    "value", ["batch-invariant", ["verified", "deterministc"], {"batch_invariant": True}, None, True]
)
def test_an_unknown_word_is_an_error(value):
    with pytest.raises(UnknownNameError, match="require: .* is unknown. (Did you mean|Known: batch_invariant, determ)"):
        OpsConfig.from_dict({"preset": "auto", "require": value}, REGISTRY)
