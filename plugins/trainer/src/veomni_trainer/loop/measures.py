"""What a row says of its steps: their time without pauses, the memory's peak, and how much arithmetic they use."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
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
_CHOSEN, _EXPERTS = ("num_experts_per_tok", "moe_topk"), ("num_experts", "num_local_experts", "n_routed_experts")
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


class StepClock:
    """Sums seconds, steps and tokens between two calls of :meth:`read`."""

    def __init__(self) -> None:
        self._mark: float | None = None
        self._seconds, self._steps, self._tokens = 0.0, 0, 0

    def start(self) -> None:
        """Mark the beginning of the first step. Later calls do nothing: a step begins when the last one ends."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def count(self, tokens: int) -> None:
        """Add tokens that were trained on."""
        self._tokens += tokens

    def end_step(self) -> None:
        """Mark the end of a step."""
        self._steps += 1
        self._advance()

    def forget_pause(self) -> None:
        """Leave out the time since the last step: it belongs to no step."""
        self._mark = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leave out a wait of ``seconds`` that has just ended, and keep the time before it."""
        if self._mark is not None:
            self._mark += seconds

    @property
    def seconds(self) -> float:
        """The seconds that the next :meth:`read` divides by."""
        self._advance()
        return self._seconds

    def read(self) -> dict[str, float]:
        """Seconds per step and tokens per second since the last call; resets the sums."""
        self._advance()
        seconds, steps, tokens = self._seconds, self._steps, self._tokens
        self._seconds, self._steps, self._tokens = 0.0, 0, 0
        return {"step_seconds": seconds / max(steps, 1), "tokens_per_second": tokens / max(seconds, 1e-9)}

    def _advance(self) -> None:
        now = time.perf_counter()
        self._seconds += now - (now if self._mark is None else self._mark)
        self._mark = now


def reset_peak(device: torch.device) -> None:
    """Reset the peak, so that it doesn't include building the model; on a CPU only if the system permits it."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """The peak in bytes."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    # Not ru_maxrss: on Linux a child process inherits it, so a comparison's eager run would report its parent's peak.
    with contextlib.suppress(OSError):
        if match := _PEAK.search(_STATUS.read_text(encoding="ascii")):
            return int(match[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def wait_for(device: torch.device) -> None:
    """Return when the work that was given to ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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


def _first(config: Any, names: Iterable[str]) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def _attention(config: Any) -> int:
    """Operations for each token and each position of its sequence."""
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return 12 * width * sum("linear" not in kind and "mamba" not in kind for kind in kinds)
