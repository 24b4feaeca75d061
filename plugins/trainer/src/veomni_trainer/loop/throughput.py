"""How much of an accelerator's arithmetic a training uses: tokens and floating-point operations a second, and MFU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from veomni_trainer.output.metrics import Row

# TFLOP/s of dense matrix products in bfloat16 and float16, as NVIDIA's data sheets state them (half of what they state
# with sparsity). A device that is not here has no MFU.
PEAKS: Mapping[str, float] = {
    "NVIDIA A100-SXM4-40GB": 312.0,  # A100 Tensor Core GPU data sheet
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,  # H100 Tensor Core GPU data sheet, SXM
    "NVIDIA H100 PCIe": 756.0,  # H100 Tensor Core GPU architecture, PCIe
    "NVIDIA H200": 989.4,  # H200 Tensor Core GPU data sheet
    "NVIDIA L4": 121.0,  # L4 Tensor Core GPU data sheet
    "NVIDIA L40S": 362.0,  # L40S data sheet
}
_WHOLE = ("bfloat16", "float16")  # the dtypes of those peaks


def peak_of(device: torch.device, dtype: str | None) -> float | None:
    """TFLOP/s that ``device`` has at most in ``dtype``; ``None`` where that is not known."""
    if device.type != "cuda" or dtype not in _WHOLE:
        return None
    return PEAKS.get(torch.cuda.get_device_name(device))


class Throughput:
    """Counts a training's floating-point operations by the usual formula, and compares them with the peak.

    A token takes 2 operations for each parameter that it meets, forward, and the same again backward for the inputs'
    gradients and for those of the parameters that are trained. Embeddings are looked up, and of experts a token meets
    those that it is sent to. Attention adds ``12 * width * length`` for each layer that has it (masked positions count,
    as in published figures); where sequences are packed, it is left out, since documents' lengths differ.

    Args:
        model: what is trained, with all its parameters.
        peak: TFLOP/s of one device.
        processes: how many devices train.
        packs: whether sequences are packed.
    """

    def __init__(self, model: nn.Module, peak: float, processes: int, packs: bool) -> None:
        self._peak, self._processes = peak, processes
        config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
        self._per_token = _dense(model, config)
        self._per_position = 0 if packs else _attention(config)
        self._operations = 0

    def count(self, tokens: int, length: int) -> None:
        """Add ``tokens``, of all devices, in sequences of ``length``."""
        self._operations += tokens * (self._per_token + self._per_position * length)

    def read(self, seconds: float) -> Row:
        """TFLOP/s of each device and their part of the peak over ``seconds``, since the last call."""
        rate = self._operations / max(seconds, 1e-9) / self._processes / 1e12
        self._operations = 0
        return {"tflops": rate, "mfu": rate / self._peak}


def _dense(model: Any, config: Any) -> int:
    """Operations for each token in products with parameters, forward and backward."""
    chosen, experts = (_first(config, names) for names in (_CHOSEN, _EXPERTS))
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    looked_up = {id(p) for p in embeddings.parameters()} if embeddings is not None else set()
    met = [
        (p.numel() * (chosen / experts if experts and ".experts." in f".{name}" else 1), p.requires_grad)
        for name, p in model.named_parameters()
        if id(p) not in looked_up and p.ndim > 1
    ]
    tied = head is not None and id(getattr(head, "weight", None)) in looked_up
    if tied:
        met.append((head.weight.numel(), head.weight.requires_grad))
    return int(sum(count * (6 if trained else 4) for count, trained in met))


_CHOSEN, _EXPERTS = ("num_experts_per_tok", "moe_topk"), ("num_experts", "num_local_experts", "n_routed_experts")


def _first(config: Any, names: Iterable[str]) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def _attention(config: Any) -> int:
    """Operations for each token and each position of its sequence."""
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return 12 * width * sum("linear" not in kind and "mamba" not in kind for kind in kinds)
