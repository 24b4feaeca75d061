"""PEFT's adapters on bound models, before and after bind: what they learn, in every state, is what eager models learn.

Adapters of fused experts are in ``tests/test_lora_on_experts.py`` and ``tests/test_switching_lora_on_experts.py``,
those of jobs in the trainer's tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, VeraConfig, get_peft_model
from torch import nn

from counting_kernels import calls, counting_registry
from models import build, tokens
from veomni_core import bind, binding_of

OPS = ("rms_norm", "swiglu_mlp", "rotary_pos_emb", "cross_entropy_loss", "moe_experts", "load_balancing_loss")
REGISTRY = counting_registry("one", ops=OPS)
CONFIG = {
    "preset": "eager",
    **dict.fromkeys(
        ("rms_norm_implementation", "swiglu_mlp_implementation", "rotary_pos_emb_implementation"),
        "auto",
    ),
    "cross_entropy_loss_implementation": "auto",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "phi3": {},  # gate and up are one linear
    "qwen3_moe": {},
}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False),
    "rank-stabilized": lambda: LoraConfig(r=3, use_rslora=True, target_modules="all-linear", init_lora_weights=False),
    "DoRA": lambda: LoraConfig(r=3, use_dora=True, target_modules="all-linear", init_lora_weights=False),
    "biases": lambda: LoraConfig(r=3, bias="lora_only", target_modules="all-linear", init_lora_weights=False),
    "IA3": lambda: IA3Config(target_modules=["o_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": lambda: VeraConfig(r=4, target_modules=["o_proj"]),
    "AdaLoRA": lambda: AdaLoraConfig(init_r=4, target_r=2, total_step=9, target_modules=["o_proj", "down_proj"]),
    "the head": lambda: LoraConfig(r=3, target_modules=["o_proj", "lm_head"], init_lora_weights=False),
    "a whole head": lambda: LoraConfig(r=3, target_modules=["o_proj"], modules_to_save=["lm_head"]),
    "trained norms": lambda: LoraConfig(r=3, target_modules=["o_proj"], modules_to_save=["norm", "input_layernorm"]),
}
LORA = ADAPTERS["LoRA"]


def adapted(model: nn.Module, adapter: str | Callable[[], Any] = "LoRA") -> Any:
    """The same random adapter each time."""
    torch.manual_seed(3)
    return get_peft_model(model, (ADAPTERS[adapter] if isinstance(adapter, str) else adapter)()).train()


def bound(model: nn.Module) -> Any:
    return bind(model, CONFIG, registry=REGISTRY, device="cpu")


def step(model: Any) -> dict[str, torch.Tensor]:
    """A step's loss, and the gradient of everything that is trained."""
    model.zero_grad()
    ids = tokens(2, 9)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(grad is None for grad in (p.grad for p in model.parameters() if not p.requires_grad))
    return {"loss": loss.detach(), **{name: grad.clone() for name, grad in trained.items() if grad is not None}}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    size = max(float(each.norm()) for each in wanted.values())
    for name, each in wanted.items():
        assert float((found[name] - each).norm()) <= 1e-5 * size, name


def ran(run: Callable[[], Any]) -> set[str]:
    """The ops whose kernel ``run`` has called."""
    before = dict(calls)
    run()
    return {key[0] for key, count in calls.items() if count > before.get(key, 0)}


# PEFT itself refuses DoRA over experts, which "all-linear" reaches.
CASES = [
    *(("llama", adapter) for adapter in ADAPTERS),
    *((family, adapter) for family in ("gemma2", "phi3") for adapter in ("LoRA", "DoRA", "the head")),
    *(("qwen3_moe", adapter) for adapter in ("LoRA", "trained norms")),
]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(("family", "adapter"), CASES)
def test_an_adapter_learns_what_it_learns_over_eager_code(family: str, adapter: str) -> None:
    before, after, eager = (build(family, **FAMILIES[family]) for _ in range(3))
    wanted = step(adapted(eager, adapter))
    late = bound(before)
    before = adapted(before, adapter)
    after = adapted(after, adapter)
    for model, binding in ((before, late), (after, bound(after))):
        kernels = ran(lambda model=model: assert_same(step(model), wanted))
        assert {"rms_norm", "rotary_pos_emb"} <= kernels
        if adapter not in ("the head", "a whole head"):
            assert "cross_entropy_loss" in kernels
        elif "cross_entropy_loss" not in kernels:  # the logits were needed, or there was no plain head to bind
            assert binding.receipt.changed or "cross_entropy_loss" not in _bound_ops(binding)
        binding.undo()
        assert_same(step(model), wanted)


def _bound_ops(binding: Any) -> set[str]:
    return {planned.spec.op_name for planned in binding.plan.kernels}


@pytest.mark.parametrize("order", ["adapter, then bind", "bind, then adapter"])
def test_every_state_of_adapters(order: str) -> None:
    """Two adapters, switched, mixed, merged, disabled and deleted: the bound model follows the eager one."""
    model, eager = build("llama"), build("llama")
    if order == "bind, then adapter":
        binding, model = bound(model), adapted(model)
    else:
        model = adapted(model)
        binding = bound(model)
    both = (model, adapted(eager))

    def same() -> None:
        assert_same(*(step(each) for each in both))

    for each in both:
        torch.manual_seed(4)
        each.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    same()
    for each in both:
        each.set_adapter("second")
    same()
    for each in both:
        each.add_weighted_adapter(["default", "second"], [0.3, 0.7], "mixed", combination_type="cat")
        each.set_adapter("mixed")
    same()
    for each in both:
        each.set_adapter("default")
        each.merge_adapter()
    with torch.no_grad():
        assert_same(*({"logits": each(input_ids=tokens(2, 9)).logits} for each in both))
    for each in both:
        each.unmerge_adapter()
    same()
    with model.disable_adapter(), both[1].disable_adapter(), torch.no_grad():
        assert_same(*({"logits": each(input_ids=tokens(2, 9)).logits} for each in both))
    for each in both:
        each.delete_adapter("second")
    same()
    assert binding.active and not binding.receipt.changed
    plain = [each.merge_and_unload() for each in both]
    for each in plain:
        each.requires_grad_(True)
    assert {"rms_norm", "swiglu_mlp", "cross_entropy_loss"} <= ran(lambda: assert_same(*map(step, plain)))
    binding_of(plain[0]).undo()
    assert_same(*map(step, plain))


def test_rows_of_several_adapters_in_one_batch() -> None:
    model, eager = build("llama"), build("llama")
    bound(model)
    both = (adapted(model), adapted(eager))
    for each in both:
        torch.manual_seed(4)
        each.add_adapter("second", LORA())
        each.eval()
    with torch.no_grad():
        named = {"adapter_names": ["default", "second"]}
        assert_same(*({"logits": each(input_ids=tokens(2, 9), **named).logits} for each in both))


def test_an_adapter_is_taken_off() -> None:
    model, eager = build("llama"), build("llama")
    binding = bound(model)
    plain = adapted(model).unload()
    plain.requires_grad_(True)
    assert_same(step(plain), step(eager))
    assert binding.active and not binding.receipt.changed
