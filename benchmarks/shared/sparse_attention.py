"""What benchmarks of sparse attention share: both passes' times, and FlashAttention 3 over all keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from benchmarks.shared.gpu_kernels import kernel_times
from benchmarks.shared.measuring import milliseconds, training_step
from benchmarks.shared.memory import peak_mib_of_step


def timed(
    forward: Callable[[], Tensor], tensors: Sequence[Tensor], doutput: Tensor | None, device: str
) -> dict[str, Any]:
    """The forward's time, and with ``doutput`` that of both passes; on a GPU memory, and the 16 longest kernels."""
    found: dict[str, Any] = {"forward": milliseconds(forward, device)}
    step: Callable[[], Any] = forward
    if doutput is not None:
        step = training_step(forward, lambda output: output.backward(doutput), tensors)
        found["both"] = milliseconds(step, device)
    if device == "cuda":
        found["peak MiB"] = peak_mib_of_step(step, tensors)
        found["kernels ms"] = dict(list(kernel_times(step).items())[:16])
    return found


def flash_attention_3(*heads: Tensor) -> Tensor:
    """Causal attention to every key by the package flash-attn-3, some versions of which give a log-sum-exp too."""
    output = import_module("flash_attn_interface").flash_attn_func(*heads, causal=True)
    return output if isinstance(output, Tensor) else output[0]
