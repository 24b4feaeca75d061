"""A module's own code in float64 judges where it and a kernel differ because one of them rounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models import build, tokens
from veomni_conformance.bound_models.exact_runs import exact_run
from veomni_conformance.bound_models.model_calls import RecordedCall, recorded_calls
from veomni_conformance.bound_models.site_comparison import Run, compare
from veomni_ops.contract import Contract
from veomni_ops.rms_norm import CONTRACTS

CONTRACT: Contract = CONTRACTS["standard"]
CALL = RecordedCall((torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_(),), {})


class Cancelling(nn.Module):
    """Subtracts almost what it added: float32 keeps few digits of the rest, float64 enough."""

    def __init__(self, off: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 1e-4))
        self.off = off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = (x * 3).float().softmax(-1, dtype=torch.float32) * 1e3
        return (large + self.weight * x.to(torch.float32) - large) * self.off


class WithoutCancelling(Cancelling):
    """The same function, without the large terms."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * self.off


def test_code_that_asks_for_float32_runs_in_float64():
    run = exact_run(Cancelling(), CALL)
    assert {result.dtype for result in run.results.values()} == {torch.float64}
    torch.testing.assert_close(run.results["the result"], CALL.args[0].double() * torch.tensor(1e-4).double())
    upstream = torch.randn((2, 3, 4), generator=torch.Generator().manual_seed(20)).double()
    torch.testing.assert_close(run.gradients["weight"], (upstream * CALL.args[0].double()).sum((0, 1)).detach())


def test_a_module_and_its_arguments_stay_as_they_are():
    module, before = Cancelling(), CALL.args[0].detach().clone()
    exact_run(module, CALL)
    assert module.weight.dtype == torch.float32 and module.weight.grad is None
    assert torch.equal(CALL.args[0], before) and CALL.args[0].grad is None


def test_a_kernel_that_is_closer_to_float64_than_the_modules_own_code_agrees():
    own, bound = Run.of(Cancelling(), CALL), Run.of(WithoutCancelling(), CALL)
    assert "the result is off: element error" in compare(own, bound, CONTRACT)
    assert not compare(own, bound, CONTRACT, exact=lambda: exact_run(Cancelling(), CALL))


def test_a_kernel_that_is_off_in_float64_too_is_refused():
    own, bound = Run.of(Cancelling(), CALL), Run.of(WithoutCancelling(off=1.01), CALL)
    difference = compare(own, bound, CONTRACT, exact=lambda: exact_run(Cancelling(), CALL))
    assert difference.endswith("so it is from what its own code computes in float64")


@pytest.mark.parametrize("measure", ["element", "norm"])
def test_a_kernel_may_round_twice_as_much_as_the_modules_own_code_within_bounds(measure):
    """Code around a kernel may round in both, so that neither keeps to the kernel's tolerance."""
    exact = torch.linspace(1, 2, 64, dtype=torch.float64)
    where = torch.ones(64, dtype=torch.float64)
    if measure == "element":
        where = F.one_hot(torch.tensor(5), 64) * (1 + exact.square().mean().sqrt() / exact[5])

    def run(error: float) -> Run:
        return Run({"the result": (exact * (1 + error * where)).float()})

    def difference(error: float, own: float) -> str:
        return compare(run(own), run(error), CONTRACT, exact=lambda: Run({"the result": exact}))

    for right, own in ((1.9e-4, -1e-4), (9.5e-4, -5e-4), (9.5e-4, -1e-1)):
        assert not difference(right, own)
    for wrong, own in ((2.2e-4, -1e-4), (1.1e-3, -1e-1), (float("nan"), -1e-4), (1.9e-4, float("nan"))):
        assert difference(wrong, own).endswith("so it is from what its own code computes in float64")


def test_without_a_run_in_float64_the_modules_own_code_is_what_counts():
    module = Cancelling()
    module.kept = module.weight * 2  # a tensor that autograd computed can't be copied
    exact = exact_run(module, CALL)
    assert exact.problem.startswith("it can't be copied into float64: ")
    own, bound = Run.of(Cancelling(), CALL), Run.of(WithoutCancelling(), CALL)
    assert "the result is off" in compare(own, bound, CONTRACT, exact=lambda: exact)


def test_experts_that_transformers_multiplies_in_groups_have_no_run_in_float64():
    model = build("qwen3_moe")
    calls, _ = recorded_calls(model, {"model.layers.1.mlp"})
    exact = exact_run(model.model.layers[1].mlp, calls["model.layers.1.mlp"])
    assert "got Double" in exact.problem


def test_the_run_in_float64_is_asked_for_only_where_they_differ():
    run = Run.of(Cancelling(), CALL)
    assert not compare(run, run, CONTRACT, exact=lambda: pytest.fail("they agree"))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_real_models_run_in_float64(name, dtype):
    model = build(name, dtype=dtype)
    path = "model.layers.0"
    calls, why_none = recorded_calls(model, {path})
    assert not why_none
    layer = model.get_submodule(path)
    own, exact = Run.of(layer, calls[path]), exact_run(layer, calls[path])
    assert not exact.problem
    allowed = {"rtol": 0.1, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for result, wanted in own.results.items():
        torch.testing.assert_close(exact.results[result], wanted.double(), **allowed)
    assert exact.gradients.keys() == own.gradients.keys()


def test_a_models_loss_runs_in_float64():
    model, ids = build("llama"), tokens(2, 9)
    call = RecordedCall((), {"input_ids": ids, "labels": ids, "use_cache": False})
    exact = exact_run(model, call)
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    assert exact.results["loss"].dtype == torch.float64
    torch.testing.assert_close(exact.results["loss"], F.cross_entropy(logits, ids[:, 1:].flatten()).double())
