"""The output projection runs once, as the module that it is: own forwards, replacements, wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from fused_head import LOSS_ALONE, REGISTRY, bound_and_eager, fused_losses
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from transformers import PreTrainedModel

from models import assert_equal_steps, build, step, tokens
from veomni_core import bind, binding_of, find_sites
from veomni_core.errors import KernelUnavailableError


class NormalisedHead(nn.Linear):
    """Baichuan 2's."""

    def forward(self, x):
        return F.linear(x, F.normalize(self.weight, dim=-1))


class ScaledHead(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3.0


class AdaptedHead(nn.Linear):
    """As loralib's linears are."""

    def __init__(self, *sizes, bias):
        super().__init__(*sizes, bias=bias)
        self.a, self.b = (nn.Parameter(0.1 * torch.randn(shape)) for shape in ((4, sizes[0]), (sizes[1], 4)))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize("kind", [NormalisedHead, ScaledHead, AdaptedHead])
def test_a_head_with_a_forward_of_its_own_is_left_eager_and_refused_where_it_is_named(kind):
    model = build("llama")
    model.lm_head = kind(32, 64, bias=False)
    eager = copy.deepcopy(model)
    with pytest.raises(KernelUnavailableError, match=f"is a {kind.__name__}, whose forward is not torch's linear"):
        bind(model, LOSS_ALONE, registry=REGISTRY)
    bind(model, {"preset": "auto", "attn_implementation": "eager"}, registry=REGISTRY)
    assert_equal_steps(step(model), step(eager))
    assert not fused_losses()


def replaced_forward(head: nn.Module) -> None:
    head.forward = lambda x: F.linear(x, head.weight) * 2.0


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda model: replaced_forward(model.lm_head), "output projection was given a forward of its own"),
        (lambda model: spectral_norm(model.lm_head), "output projection's weight is parametrized"),
        (
            lambda model: setattr(model, "forward", lambda **inputs: None),
            "its forward was set on the instance",
        ),
    ],
    ids=["a forward on the head", "a parametrization", "a forward on the model"],
)
def test_what_was_replaced_before_bind_leaves_the_loss_eager(change, reason):
    model = build("llama")
    change(model)
    (site,) = [site for site in find_sites(model, REGISTRY) if site.op_name == "cross_entropy_loss"]
    assert site.variant is None and reason in site.evidence


class CastOutput(nn.Sequential):
    def forward(self, x):
        return super().forward(x).float()


def wrapped(model: PreTrainedModel) -> None:
    model.lm_head = CastOutput(model.lm_head)


REPLACEMENTS: dict[str, Callable[[PreTrainedModel], object]] = {
    "resized": lambda model: model.resize_token_embeddings(72, mean_resizing=False),
    "replaced": lambda model: model.set_output_embeddings(nn.Linear(32, 64, bias=False)),
    "wrapped": wrapped,
}


@pytest.mark.parametrize("change", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_what_takes_the_head_s_place_is_fused_too_and_left_as_it_came(change):
    model, eager = bound_and_eager()
    for each in (model, eager):
        torch.manual_seed(5)
        change(each)
    assert_equal_steps(step(model), step(eager))
    assert fused_losses() == 1
    binding_of(model).undo()
    assert all(type(module).forward is nn.Linear.forward for module in model.modules() if type(module) is nn.Linear)
    assert isinstance(model.lm_head, CastOutput) or type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("saved", [["lm_head"], ["norm", "lm_head"]], ids=str)
def test_a_copy_of_the_head_that_peft_trains_is_fused_with_its_own_weight(saved):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved, task_type="CAUSAL_LM")
    models = []
    for model in bound_and_eager():
        torch.manual_seed(7)
        model = peft.get_peft_model(model, config)
        model.get_output_embeddings().weight.data.mul_(1.5)
        models.append(model)
    assert_equal_steps(*[step(model) for model in models])
    assert fused_losses() == 1


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2.0


def test_a_parametrization_after_bind_is_computed_once_a_step():
    model, eager = bound_and_eager()
    counters = [Counting(), Counting()]
    for each, counter in zip((model, eager), counters, strict=True):
        parametrize.register_parametrization(each.lm_head, "weight", counter)
        counter.calls = 0
    assert_equal_steps(step(model), step(eager))
    assert [counter.calls for counter in counters] == [1, 1]


def test_accelerate_s_autocast_leaves_the_logits_uncomputed_and_its_unwrapping_the_kernel(bf16_accelerator):
    model, _ = bound_and_eager()
    ids = tokens()
    output = bf16_accelerator.prepare_model(model)(input_ids=ids, labels=ids)
    output.loss.backward()
    assert fused_losses() == 1
    bf16_accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    step(model)
    assert fused_losses() == 2
