"""chunk_gated_delta_rule by flash-linear-attention's function of this name, and by FlashQLA's of the same call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from veomni_fla.delta_rules import Call, adapted, even, of_aligned_memory
from veomni_fla.loading import of_fla, of_library
from veomni_fla.pinned import pinned
from veomni_ops.chunk_gated_delta_rule import check_call
from veomni_ops.delta_rule_samples import WIDE_HEADS, WIDEST_HEAD

_MODULE, _NAME = "ops.gated_delta_rule.chunk", "chunk_gated_delta_rule"


def fla() -> Call:
    """fla's function, with its Triton kernels throughout.

    Raises:
        ImportError: fla can't be imported.
    """
    return adapted("fla", pinned(of_fla(_MODULE, _NAME)), check_call, even)


def fla_tilelang() -> Call:
    """The same, with fla's TileLang kernel for the gradients of queries, keys and decays.

    Raises:
        ImportError: fla or TileLang can't be imported.
    """
    gradients = of_fla("ops.common.backends.tilelang.chunk_bwd", "chunk_bwd_dqkwg_tilelang")
    library = pinned(of_fla(_MODULE, _NAME), {"chunk_bwd_dqkwg": gradients})
    return adapted("fla_tilelang", of_aligned_memory(library), check_call, multiple_of_16)


def flash_qla() -> Call:
    """FlashQLA's function. It divides a long sequence into parts, and forgets what decayed to less than ``exp(-10)``.

    Raises:
        ImportError: FlashQLA can't be imported, which on another GPU than it is for it can't.
    """
    library = pinned(of_library("flash-qla", "flash_qla.ops.gated_delta_rule.chunk", _NAME), compiled=with_denormals)
    return adapted("flash_qla", any_call(of_aligned_memory(library)), check_call, one_tile)


def with_denormals(kernel: Any) -> Any:
    """A kernel in TileLang, compiled so that numbers below 1.2e-38 count; with fast math alone they are zeros."""
    return replace(kernel, pass_configs={**(kernel.pass_configs or {}), "tl.device_compile_flags": ["--ftz=false"]})


def multiple_of_16(width: int) -> int:
    """The next multiple of 16, the least that a matrix unit multiplies."""
    return -(-width // 16) * 16


def one_tile(width: int) -> int:
    """The width of FlashQLA's heads.

    Raises:
        ValueError: a head is wider.
    """
    if width > WIDEST_HEAD:
        raise ValueError(f"flash_qla does not compute {WIDE_HEADS}: it takes heads of up to {WIDEST_HEAD}, not {width}")
    return WIDEST_HEAD


def any_call(library: Call) -> Call:
    """FlashQLA's function, for calls that FlashQLA 0.1.3 with TileLang 0.1.15 does not take.

    - A packed sequence without a token is "an invalid length". Its final state is its initial one.
    - Of an odd number of value heads above one, the sums of decays don't compile: the numbers of 64 tokens must divide
      among 128 threads. Heads of zeros are added.

    What doesn't apply copies nothing.

    Args:
        library: as :func:`veomni_fla.delta_rules.adapted` calls it, but for ``cu_seqlens_cpu``.
    """

    def call(
        *tensors: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta = tensors
        value_heads, state, filled = v.shape[2], initial_state, None
        if cu_seqlens is not None and cu_seqlens_cpu is not None:
            lengths = cu_seqlens_cpu.diff()
            if not lengths.all():
                filled = lengths.nonzero().flatten().to(v.device)  # the sequences that have tokens
                cu_seqlens = cu_seqlens_cpu.unique_consecutive().to(v.device)
                state = None if state is None else state[filled]
            options["cu_seqlens"] = cu_seqlens
        more_keys, more_values = _heads_missing(k.shape[2], value_heads)
        if more_values:
            q, k = (F.pad(x, (0, 0, 0, more_keys)) for x in (q, k))
            v, g, beta = F.pad(v, (0, 0, 0, more_values)), F.pad(g, (0, more_values)), F.pad(beta, (0, more_values))
            state = None if state is None else F.pad(state, (0, 0, 0, 0, 0, more_values))
        output, final = library(q, k, v, g, beta, initial_state=state, **options)
        output, final = output[:, :, :value_heads], None if final is None else final[:, :value_heads]
        if filled is None or final is None:
            return output, final
        if initial_state is None:
            initial_state = final.new_zeros(len(lengths), *final.shape[1:])
        return output, initial_state.index_copy(0, filled, final)

    return call


def _heads_missing(key_heads: int, value_heads: int) -> tuple[int, int]:
    """How many heads of keys and of values to add, so that values have one or an even number.

    Each head of keys is read by as many as before; a single one, by one more.
    """
    if value_heads == 1 or value_heads % 2 == 0:
        return 0, 0
    return (0, 1) if key_heads == 1 else (1, value_heads // key_heads)
