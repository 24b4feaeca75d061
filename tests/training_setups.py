"""Tiny real models and the ways in which people train them, for the matrix of both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

Step = tuple[torch.Tensor, dict[str, torch.Tensor]]
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "output_router_logits": True,
}
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 64,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attention_probs_dropout_prob": 0.0,
}
# Dropout stays on in T5 and BERT: equal seeds must drop the same values, bound or not.
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _DECODER),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_DECODER, **_EXPERTS}),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextConfig", _DECODER),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
}
_NO_DROPOUT = {"t5": {"dropout_rate": 0.0}, "bert": {"hidden_dropout_prob": 0.0}}
FAMILIES = tuple(_MODELS)
DECODERS = FAMILIES[:3]
AUTO = {"preset": "auto"}


def build(family: str, dtype: torch.dtype = torch.float32, dropout: bool = True) -> PreTrainedModel:
    """A tiny model of ``family`` in evaluation mode, as ``from_pretrained`` leaves it."""
    model_class, config_class, sizes = _MODELS[family]
    if not dropout:
        sizes = {**sizes, **_NO_DROPOUT.get(family, {})}
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes))
    with torch.no_grad():  # no parameter stays at 0 or 1, or a kernel that ignores it would pass
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def tokens(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    """Random token ids without the special ones."""
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, ids: torch.Tensor | None = None, scale: float = 1.0) -> Step:
    """The loss of one training step, and every gradient by parameter name; equal seeds drop equal values."""
    ids = tokens() if ids is None else ids
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids).loss
    (loss * scale).backward()
    gradients = {name: p.grad.float() / scale for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach().float(), gradients


def assert_equal_steps(found: Step, wanted: Step) -> None:
    """Equal up to another order of float32 summation.

    A gradient that is zero but for rounding, as that of a key's bias, is measured by the model's largest.
    """
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    largest = max(float(gradient.norm()) for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        size = max(float(gradient.norm()), 1e-3 * largest)
        assert float((found[1][name] - gradient).norm()) <= 1e-4 * size, name


def assert_as_accurate(found: Step, eager: Step, exact: Step) -> None:
    """In low precision: no further from float32 than eager code is, by more than rounding's luck."""
    for name, gradient in exact[1].items():
        allowed = 2.0 * float((eager[1][name] - gradient).norm()) + 2e-2 * float(gradient.norm()) + 1e-5
        assert float((found[1][name] - gradient).norm()) <= allowed, name
    assert abs(float(found[0] - exact[0])) <= 2.0 * abs(float(eager[0] - exact[0])) + 1e-2


@dataclass(frozen=True)
class Setup:
    """One way to train: what is done to a model before bind and after it, and the context that a step runs in."""

    before: Callable[[PreTrainedModel], Any] = lambda model: model
    after: Callable[[PreTrainedModel], Any] = lambda model: model
    context: Callable[[], Any] | None = None

    def prepared(self, model: PreTrainedModel, bind: Callable[[Any], object] | None) -> Any:
        """``model`` in training mode after both, bound in between where ``bind`` is given."""
        model = self.before(model)
        if bind is not None:
            bind(model)
        return self.after(model).train()


@contextmanager
def autocast() -> Iterator[None]:
    """float32 weights under bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        yield


def checkpointed(model: PreTrainedModel) -> PreTrainedModel:
    """With its layers computed again in backward."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def offloaded(model: PreTrainedModel) -> PreTrainedModel:
    """With accelerate's hooks on every module that has weights."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in model.modules():
        if module._parameters:
            add_hook_to_module(module, AlignDevicesHook(io_same_device=True))
    return model


def adapted(model: PreTrainedModel) -> Any:
    """With LoRA on the attention's and the MLP's linears."""
    import peft

    torch.manual_seed(7)
    wanted = {"q_proj", "gate_proj", "down_proj", "q", "wi_0", "wo", "query", "output.dense"}
    names = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets = sorted(wanted & names) or ["query"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def resized(model: PreTrainedModel) -> PreTrainedModel:
    """With eight more tokens."""
    torch.manual_seed(5)
    model.resize_token_embeddings(72, mean_resizing=False)
    return model


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    """With hooks on the output projection that read, scale and clip."""
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
    head.register_forward_hook(lambda module, inputs, logits: logits * 0.5)
    head.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 0.5 for g in inputs))
    return model


def duplicated(model: PreTrainedModel) -> PreTrainedModel:
    """A deep copy of it."""
    return copy.deepcopy(model)


SETUPS: dict[str, Setup] = {
    "bound in eval": Setup(),
    "gradient checkpointing": Setup(after=checkpointed),
    "accelerate's hooks before bind": Setup(before=offloaded),
    "accelerate's hooks after bind": Setup(after=offloaded),
    "LoRA before bind": Setup(before=adapted),
    "LoRA after bind": Setup(after=adapted),
    "resized vocabulary": Setup(after=resized),
    "hooks on the head": Setup(after=hooked),
    "a deep copy": Setup(after=duplicated),
}
