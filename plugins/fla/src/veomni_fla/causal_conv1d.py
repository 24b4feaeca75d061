"""causal_conv1d by flash-linear-attention's Triton kernels, and by the package ``causal-conv1d``'s CUDA kernels.

The op's ``x`` is ``[B, C, S]``. fla has channels last, ``[B, S, C]``, which is how mixers have them in memory. It takes
packed sequences as boundaries in a batch of one row, so rows are joined, and the numbers of the op's ``seq_idx`` become
boundaries: that waits for the device, once per call. The package takes the numbers as they are and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_fla.limits import MOST_PLANES
from veomni_fla.loading import of_fla, of_library
from veomni_fla.pinned import pinned
from veomni_ops.causal_conv1d import check_arguments

Kernel = Callable[..., Tensor]
Library = Callable[..., Any]
_GRAPH_BREAK = "the library chooses its launches on the host"
_WIDTHS = range(2, 5)  # of the package
_ALIGNED, _BYTES = 8, 16  # channels where they are next to each other in memory, and what is read at a time


def fla() -> Kernel:
    """fla's kernels, for any width.

    Raises:
        ImportError: fla can't be imported.
    """
    return by_boundaries(pinned(of_fla("modules.causal_conv1d.ops", "CausalConv1dFunction")).apply)


def causal_conv1d() -> Kernel:
    """The package's kernels, for widths of two to four.

    Raises:
        ImportError: the package can't be imported.
    """
    function = of_library("causal-conv1d", "causal_conv1d.causal_conv1d_interface", "causal_conv1d_fn")
    return by_numbers(pinned(function))


def by_boundaries(library: Library) -> Kernel:
    """The kernel by a function of fla's arguments.

    Args:
        library: ``(x[B, S, C], weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens,
            cu_seqlens_cpu)`` to the output, of x's shape, and a state. ``cu_seqlens`` needs a batch of one.
    """

    @torch.compiler.disable(reason=_GRAPH_BREAK)  # type: ignore[untyped-decorator]
    def kernel(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        check_arguments(x, weight, bias, activation, seq_idx)
        if not x.numel():
            return _of_nothing(x, weight, bias)
        rows = x.transpose(1, 2)  # [B, S, C]
        batch, length, channels = rows.shape
        bounds, on_host = None, None
        if seq_idx is not None:
            rows = rows.reshape(1, batch * length, channels)
            on_host = _boundaries(seq_idx)
            bounds = on_host.to(x.device, non_blocking=True)
        used = _used(weight, length)
        outputs = [
            library(part, used, bias, None, None, False, activation, bounds, on_host)[0]
            for part in rows.split(MOST_PLANES)  # fla launches one for each row
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.view(batch, length, channels).transpose(1, 2)

    return kernel


def by_numbers(library: Library) -> Kernel:
    """The kernel by a function of the package's arguments.

    Args:
        library: ``(x[B, C, S], weight, bias, seq_idx=, activation=)``. With ``seq_idx`` it takes channels that are next
            to each other in memory, and then their number must be a multiple of 8.
    """

    @torch.compiler.disable(reason=_GRAPH_BREAK)  # type: ignore[untyped-decorator]
    def kernel(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        check_arguments(x, weight, bias, activation, seq_idx)
        if weight.shape[1] not in _WIDTHS:
            widths = f"{_WIDTHS.start} to {_WIDTHS.stop - 1}"
            raise ValueError(f"causal_conv1d does not compute any_width: it takes {widths}, not {weight.shape[1]}")
        if not x.numel():
            return _of_nothing(x, weight, bias)
        weight = _used(weight, x.shape[2])
        if bias is not None and bias.dtype != weight.dtype:
            weight, bias = weight.float(), bias.float()
        numbers = None
        if seq_idx is not None:
            # The package takes a negative number for padding. Numbers don't decrease along a row.
            numbers = (seq_idx - seq_idx[:, :1]).to(torch.int32).contiguous()
        channels_last = numbers is not None or x.stride(1) == 1
        missing = -x.shape[1] % _ALIGNED if channels_last else 0
        if missing:
            x, weight = F.pad(x, (0, 0, 0, missing)), F.pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else F.pad(bias, (0, missing))
        output = library(_laid_out(x, channels_last), weight, bias, seq_idx=numbers, activation=activation)
        if output.requires_grad:  # the package reads the incoming gradient as it reads x
            output.register_hook(lambda gradient: _laid_out(gradient, channels_last))
        return output[:, :-missing] if missing else output

    return kernel


def _used(weight: Tensor, length: int) -> Tensor:
    """``weight[C, W]`` with zeros for the taps that no position of ``length`` reaches: a NaN there has no effect."""
    unused = weight.shape[1] - length
    return F.pad(weight[:, unused:], (unused, 0)) if unused > 0 else weight


def _laid_out(x: Tensor, channels_last: bool) -> Tensor:
    """``x[B, C, S]``, copied unless the package can read it as it is: 16 bytes at a time, from even addresses."""
    rows = x.transpose(1, 2) if channels_last else x
    even = rows.stride(2) == 1 and not any(stride % _ALIGNED for stride in rows.stride()[:2])
    whole = even and rows.stride(1) >= rows.shape[2] if channels_last else rows.is_contiguous()
    if not whole or rows.data_ptr() % _BYTES:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.transpose(1, 2) if channels_last else rows


def _boundaries(seq_idx: Tensor) -> Tensor:
    """``cu_seqlens`` on the host of the rows of ``seq_idx[B, S]`` one after the other: int32 ``[N + 1]``."""
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    first = begins.flatten().cpu().nonzero().flatten()  # the host waits here
    return torch.cat([first, first.new_tensor([seq_idx.numel()])]).to(torch.int32)


def _of_nothing(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A result without an element. Gradients are zeros, and none is missing."""
    nothing = sum(each[:0].sum() for each in (weight, bias) if each is not None)
    return (x + nothing).to(x.dtype)
