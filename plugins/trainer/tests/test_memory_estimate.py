"""The memory estimate: each part against what a real model and a real step hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_configs import LLAMA, QWEN3_MOE

from veomni_core import build_foundation_model
from veomni_trainer.data.tokens import load_tokenizer
from veomni_trainer.job.load import parse_job
from veomni_trainer.job.schema import Job, LoraSection
from veomni_trainer.setup.conditions import for_this_machine, ops_config, weights_dtype
from veomni_trainer.setup.memory_estimate import MemoryEstimate, estimate_memory, layers_of, step_memory
from veomni_trainer.setup.model import model_config
from veomni_transformers.build import build_skeleton

QWEN3_NEXT = {
    **QWEN3_MOE,
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,  # of two kinds: every fourth has attention
    "head_dim": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DEEPSEEK_V3 = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,  # the first layer has no experts
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def _job(config: dict[str, Any], preset: str = "eager", **train: Any) -> Job:
    job = {
        "model": {"config": config, "ops_implementation": {"preset": preset}},
        "data": {"files": "python-stdlib", "sequence_length": 32},
        "train": {"output_dir": "run", "steps": 1, "batch_size": 2, "device": "cpu", **train},
    }
    return for_this_machine(parse_job(job))


def _estimate(job: Job) -> MemoryEstimate:
    skeleton = build_skeleton(model_config(job, load_tokenizer("bytes")), torch_dtype=weights_dtype(job))
    torch.manual_seed(0)  # of the tokens, and so of what the experts get
    return estimate_memory(job, ops_config(job), skeleton, torch.device("cpu"))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("preset", ["eager", "auto"])
@pytest.mark.parametrize(
    ("config", "measured"),
    [({**LLAMA, "num_hidden_layers": 3}, 2), (QWEN3_NEXT, 4), (DEEPSEEK_V3, 2)],
    ids=["llama", "qwen3_next", "deepseek_v3"],
)
def test_activations_of_few_layers_stand_for_all(config: dict[str, Any], measured: int, preset: str) -> None:
    job = _job(config, preset)
    estimate = _estimate(job)
    torch.manual_seed(0)
    whole = build_foundation_model(
        model_config(job, load_tokenizer("bytes")),
        ops_implementation=ops_config(job),
        torch_dtype="float32",
        init_device="cpu",
        device="cpu",
    ).train()
    torch.manual_seed(0)
    ids = torch.randint(320, (2, 32))
    kept = step_memory(whole, {"input_ids": ids, "labels": ids, "use_cache": False}, None)

    assert estimate.measured_layers == measured
    assert len(kept.layers) == config["num_hidden_layers"]
    # Routers choose differently in each layer, so experts keep a little more or less there.
    assert estimate.activations == pytest.approx(sum(kept.layers), rel=0.02 if "moe_intermediate_size" in config else 0)
    assert estimate.logits == pytest.approx(kept.rest, rel=0.01)
    assert estimate.weights == sum(tensor.nbytes for tensor in (*whole.parameters(), *whole.buffers()))


def test_what_is_kept_is_counted_once_and_without_weights() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, x.view(-1))  # one memory, twice
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.saved_tensors[0] * grad

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 3))

        def forward(self, x: torch.Tensor) -> Any:
            Square.apply(x.repeat(2, 1) @ self.weight)  # nothing holds this until the backward
            return SimpleNamespace(loss=Square.apply(x @ self.weight).sum())

    kept = step_memory(Model(), {"x": torch.ones(5, 3)}, None)
    assert kept.layers == ()
    assert kept.rest == (5 * 3 + 5 * 3) * 4  # the product's input, and its result; the weight is no activation


def test_gradient_checkpointing_keeps_the_inputs_and_one_layer() -> None:
    plain, checkpointed = _estimate(_job(LLAMA)), _estimate(_job(LLAMA, gradient_checkpointing=True))
    inputs = 2 * (2 * 32 * LLAMA["hidden_size"] * 4)  # layers x [batch, tokens, hidden]
    one_layer = checkpointed.activations - inputs
    assert plain.activations / 2 <= one_layer < 1.05 * plain.activations / 2  # the first of the two keeps more
    assert checkpointed.logits == plain.logits


@pytest.mark.thorough
def test_parts_of_a_sharded_model_are_those_of_one_process() -> None:
    whole, sharded = _estimate(_job(QWEN3_MOE)), _estimate(_job(QWEN3_MOE, fsdp_size=4, ep_size=2))
    assert sharded.weights == pytest.approx(whole.weights / 4, rel=0.01)
    assert sharded.optimizer == 2 * sharded.gradients


def test_layers_are_found_once() -> None:
    model = build_skeleton(model_config(_job(QWEN3_MOE), load_tokenizer("bytes")))
    assert layers_of(model) == list(model.model.layers)


def test_gradients_come_as_activations_go() -> None:
    parts = {"weights": 10, "gradients": 10, "optimizer": 20, "activations": 7, "logits": 2, "measured_layers": 2}
    assert MemoryEstimate(**parts, brief=0, accumulates=False).total == 40  # the backward ends with all gradients
    assert MemoryEstimate(**parts, brief=5, accumulates=False).total == 44  # it begins with all activations
    assert MemoryEstimate(**parts, brief=5, accumulates=True).total == 54


@pytest.mark.thorough
def test_an_adapter_alone_has_gradients(tmp_path: Path) -> None:
    config = {**LLAMA, "vocab_size": 320}
    whole = _job(config)
    build_foundation_model(config, ops_implementation={"preset": "eager"}, init_device="cpu").save_pretrained(tmp_path)
    adapted = whole.model_copy(
        update={
            "model": replace(whole.model, config=None, weights=str(tmp_path)),
            "data": whole.data.model_copy(update={"tokenizer": "bytes"}),
            "lora": LoraSection(rank=2, target_modules=["q_proj"]),
        }
    )
    with_all, with_adapter = _estimate(whole), _estimate(adapted)
    elements = 2 * (LLAMA["hidden_size"] * 2 + 2 * LLAMA["hidden_size"])  # layers x (A [2, hidden] and B [hidden, 2])
    assert with_adapter.gradients == 4 * elements
    assert with_adapter.optimizer == 2 * with_adapter.gradients
    assert with_adapter.weights == with_all.weights + 4 * elements
