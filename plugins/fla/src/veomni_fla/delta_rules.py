"""What the adapters of delta rules share: it fills in what the libraries' functions of this call don't do.

That is calls without tokens, which would launch empty grids; widths and addresses that a library can't load; and
boundaries. Boundaries are copied for every call, since fla keeps what it derived from a tensor of boundaries for the
next call with this very tensor, and would not see that its values have changed.

Shape suffixes: ``B`` batch, ``S`` sequence, ``H`` heads, ``K`` key width, ``V`` value width, ``N`` sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import begins_aligned, product_operands
from veomni_fla.limits import MOST_PLANES

Call = Callable[..., tuple[Tensor, Tensor | None]]
_EXACT = (torch.bfloat16, torch.float16)  # float32 would be multiplied as TF32
_GRAPH_BREAK = "the library reads boundaries on the host, and chooses its launches there"


def even(width: int) -> int:
    """The next even width: fla asserts even ones where Triton read past the end of odd ones in 16 bits."""
    return width + width % 2


def of_aligned_memory(library: Call) -> Call:
    """``library`` for tensors that begin at any address, with any strides.

    TileLang's kernels (0.1.15) load up to 16 bytes at a time, and raise or crash if a tensor begins at no multiple of
    16. Such an input, or gradient of a result, is copied. They also raise if a single head has another stride than one
    of many would have, which ``contiguous`` leaves as it is.

    Args:
        library: as :func:`adapted` calls it.
    """

    def call(*tensors: Tensor, initial_state: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
        results = library(*map(_aligned, tensors), initial_state=_aligned(initial_state), **options)
        for result in results:
            if result is not None and result.requires_grad:
                result.register_hook(_aligned)  # with None, where a loss is of the other result alone
        return results

    return call


def _aligned(x: Tensor | None) -> Tensor | None:
    if x is not None and 1 in x.shape[1:]:
        x = x.flatten().view(x.shape)
    return x if x is None or begins_aligned(x) else x.clone()


def adapted(name: str, library: Call, check_call: Callable[..., Any], loaded: Callable[[int], int]) -> Call:
    """The kernel of a delta rule by a ``library``'s function.

    Args:
        name: the kernel's name, for messages.
        library: ``(q, k, v, g, beta, scale=, initial_state=, output_final_state=, use_qk_l2norm_in_kernel=,
            cu_seqlens=, cu_seqlens_cpu=)``, as fla has it. It gets the boundaries on the host too, and need not wait a
            second time for the device that has them.
        check_call: the op's check, which returns where packed sequences begin and end.
        loaded: the width that heads of a width are padded to. Columns of zeros change nothing.
    """
    library = _in_parts(library)

    @torch.compiler.disable(reason=_GRAPH_BREAK)  # type: ignore[untyped-decorator]
    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        bounds = check_call(query, key, value, g, beta, initial_state, cu_seqlens)
        q, k, v = product_operands(name, dtypes=_EXACT, query=query, key=key, value=value)
        key_width, value_width = key.shape[-1], value.shape[-1]
        wide_key, wide_value = loaded(key_width), loaded(value_width)
        if not value.numel() or not key_width:
            sequences = query.shape[0] if bounds is None else len(bounds)
            return _of_nothing((query, key, value, g, beta), initial_state, sequences, output_final_state)
        options: dict[str, Any] = {}
        if cu_seqlens is not None:
            options["cu_seqlens"] = cu_seqlens.to(torch.int32, copy=True)
            options["cu_seqlens_cpu"] = torch.tensor([0, *(last for _, last in bounds)], dtype=torch.int32)
        output, state = library(
            _widened(q, wide_key),
            _widened(k, wide_key),
            _widened(v, wide_value),
            # A decay per head, or per column of the keys. FlashQLA would add 64 of them up in their own dtype.
            (g if g.dim() == beta.dim() else _widened(g, wide_key)).float(),
            beta,
            scale=key_width**-0.5 if scale is None else scale,
            initial_state=_state_widened(initial_state, wide_key, wide_value),
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **options,
        )
        output = output[..., :value_width].to(query.dtype)
        return output, None if state is None else state[..., :key_width, :value_width]

    return kernel


def _in_parts(library: Call) -> Call:
    """``library`` for batches of any size: fla launches a plane of blocks for each head of a row."""

    def call(*tensors: Tensor, initial_state: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
        rows = max(1, MOST_PLANES // tensors[2].shape[2])  # the values' heads
        if len(tensors[0]) <= rows:
            return library(*tensors, initial_state=initial_state, **options)
        parts = [x.split(rows) for x in tensors]
        states = [None] * len(parts[0]) if initial_state is None else initial_state.split(rows)
        results = [library(*part, initial_state=state, **options) for *part, state in zip(*parts, states, strict=True)]
        output, final = zip(*results, strict=True)
        return torch.cat(output), None if final[0] is None else torch.cat(final)

    return call


def _widened(x: Tensor, width: int) -> Tensor:
    """``x[..., W]`` with zeros in further columns, up to ``width``."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _state_widened(state: Tensor | None, key_width: int, value_width: int) -> Tensor | None:
    """``state[N, HV, K, V]`` in float32, with zeros in further rows and columns."""
    if state is None:
        return None
    missing = (0, value_width - state.shape[3], 0, key_width - state.shape[2])
    return F.pad(state.float(), missing) if any(missing) else state.float()


def _of_nothing(
    inputs: Sequence[Tensor], initial_state: Tensor | None, sequences: int, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """An empty output ``[B, S, HV, V]``, and the states as they were. Gradients are zeros, and none is missing."""
    query, key, value = inputs[:3]
    nothing = sum((x[:0].sum() for x in inputs), start=query.new_zeros(()))
    output = (torch.zeros_like(value) + nothing).to(query.dtype)
    if not output_final_state:
        return output, None
    shape = (sequences, value.shape[2], key.shape[3], value.shape[3])
    state = value.new_zeros(shape, dtype=torch.float32) if initial_state is None else initial_state.float()
    return output, state + nothing.float()
