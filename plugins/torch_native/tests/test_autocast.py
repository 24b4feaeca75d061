"""Float32 weights under autocast, as in mixed precision: what is bound is as exact as the model's own code.

Every token takes every expert here. Otherwise rounding would now and then choose another expert on one of the sides.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import Trainer, TrainingArguments

from models import build, tokens
from veomni_core import bind
from veomni_ops import load_balancing_loss as balancing_reference
from veomni_torch import cross_entropy_loss, load_balancing_loss, moe_experts

ALL_EXPERTS = {"num_experts_per_tok": 4, "experts_implementation": "eager"}
FAMILIES = {
    "llama": {},
    "gemma3_text": {},
    "qwen3_moe": ALL_EXPERTS,
    "mixtral": ALL_EXPERTS,
    "gpt_oss": {"num_local_experts": 4, **ALL_EXPERTS},
}
KERNELS = {
    "attn_implementation": "sdpa",
    "rms_norm_implementation": "torch",
    "swiglu_mlp_implementation": "torch",
    "cross_entropy_loss_implementation": "chunk_loss",
    "moe_implementation": "grouped_mm",
    "load_balancing_loss_implementation": "torch",
}
CONFIGS = [
    *((family, {"preset": "auto", "attn_implementation": "eager"}) for family in FAMILIES),
    *(("llama", {"preset": "eager", field: KERNELS[field]}) for field in list(KERNELS)[:4]),
    *(("qwen3_moe", {"preset": "eager", field: KERNELS[field]}) for field in list(KERNELS)[4:]),
]
BF16 = torch.bfloat16
# Where a GPU is, `auto` chooses its kernels.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _model(family):
    model = build(family, **FAMILIES[family])
    model.set_attn_implementation("eager")
    return model.to(DEVICE)


def _gradients(model, seed, autocast):
    ids = tokens(2, 33, seed=seed).to(DEVICE)
    model.zero_grad(set_to_none=True)
    with torch.autocast(DEVICE, BF16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double(), **gradients}


def _id(value):
    return value if isinstance(value, str) else list(value)[1]


@pytest.mark.thorough
@pytest.mark.parametrize("family, config", CONFIGS, ids=_id)
def test_a_bound_model_is_as_near_to_the_exact_gradients_as_the_models_own_code(family, config):
    exact, eager, bound = _model(family).double(), _model(family), _model(family)
    binding = bind(bound, config)
    assert any(decision.bound for op in binding.plan.ops for decision in op.sites)
    own, kernels = Counter(), Counter()
    for seed in range(3):
        wanted = _gradients(exact, seed, autocast=False)
        for errors, model in ((own, eager), (kernels, bound)):
            found = _gradients(model, seed, autocast=True)
            assert found.keys() == wanted.keys()
            errors.update({name: float((found[name] - value).square().sum()) for name, value in wanted.items()})
    assert all(parameter.grad.dtype == torch.float32 for parameter in bound.parameters() if parameter.grad is not None)
    # Of the loss an eighth of its bf16 rounding, since by chance eager's may be nearer than its rounding lets it be.
    own["loss"] += 3 * (2**-12 * 4.2) ** 2
    assert {name: kernels[name] / own[name] for name in own if kernels[name] > 1.5**2 * own[name]} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_trainer_in_bf16_mixed_precision_learns_as_it_does_unbound(family, tmp_path):
    def losses(bound):
        model = _model(family)
        if bound:
            bind(model, {"preset": "auto", "attn_implementation": "eager"})
        rows = [{"input_ids": ids, "labels": ids} for ids in tokens(16, 9)]
        settings = {"bf16": True, "use_cpu": DEVICE == "cpu", "max_steps": 2, "logging_steps": 1}
        quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        trainer = Trainer(model, TrainingArguments(tmp_path / str(bound), **settings, **quiet), train_dataset=rows)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    found, wanted = losses(bound=True), losses(bound=False)
    assert len(found) == 2
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=0)


def _leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def _routes(tokens, experts):
    return torch.arange(2 * tokens).view(tokens, 2) % experts


CALLS = {
    "chunk_loss": (lambda h, w: cross_entropy_loss.causal(h, w, torch.arange(30) % 11), [(30, 8), (11, 8)]),
    "grouped_mm": (
        lambda h, w, u, d: moe_experts.standard(h, _routes(7, 4), w, u, d),
        [(7, 8), (7, 2), (4, 12, 8), (4, 8, 6)],
    ),
    "grouped_mm clamped": (
        lambda h, w, u, d, b: moe_experts.clamped(h, _routes(7, 4), w, u, d, b),
        [(7, 8), (7, 2), (4, 12, 8), (4, 8, 6), (4, 12)],
    ),
    "load_balancing_loss": (lambda a: load_balancing_loss.standard((a,), 4, 2, torch.ones(2, 3)), [(6, 4)]),
}


@pytest.mark.parametrize("function, shapes", CALLS.values(), ids=CALLS)
def test_compiles_without_a_graph_break_under_autocast(function, shapes):
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [_leaf(*shape) for shape in shapes]

    def run(call):
        with torch.autocast("cpu", BF16):
            result = call(*inputs)
        return result, *torch.autograd.grad(result.square().sum(), inputs)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(run(compiled), run(function), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("function, shapes", CALLS.values(), ids=CALLS)
def test_a_backward_inside_the_autocast_region_gives_the_same_gradients(function, shapes):
    torch.manual_seed(0)
    inputs = [_leaf(*shape) for shape in shapes]
    with torch.autocast("cpu", BF16):
        result = function(*inputs).square().sum()
        inside = torch.autograd.grad(result, inputs, retain_graph=True)
    outside = torch.autograd.grad(result, inputs)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(inside, outside, strict=True))


@pytest.mark.parametrize(
    "name, message",
    [
        ("grouped_mm", "grouped_mm multiplies tensors of one dtype, but hidden is float32, gate_up_proj is bfloat16"),
        ("chunk_loss", "chunk_loss multiplies tensors of one dtype, but hidden is float32, weight is bfloat16"),
    ],
)
def test_operands_of_several_dtypes_are_refused_by_their_names(name, message):
    function, shapes = CALLS[name]
    first, *others = shapes
    with pytest.raises(TypeError, match=message):
        function(_leaf(*first), *(_leaf(*shape, dtype=BF16) for shape in others))


def test_balancing_sums_in_float32_under_autocast():
    """Its products of float32 sums are no eager code's, so autocast must not round their operands."""
    torch.manual_seed(0)
    logits, mask = _leaf(300, 8), torch.ones(3, 100)
    wanted = balancing_reference.standard((logits,), 8, 2, mask)
    with torch.autocast("cpu", BF16):
        found = load_balancing_loss.standard((logits,), 8, 2, mask)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    mine, theirs = (torch.autograd.grad(loss, logits)[0] for loss in (found, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-8)
