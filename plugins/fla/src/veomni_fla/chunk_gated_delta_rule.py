"""chunk_gated_delta_rule by flash-linear-attention's function of this name, and by FlashQLA's of the same call."""

from __future__ import annotations

from veomni_core.ops.chunk_gated_delta_rule import check_call
from veomni_core.ops.delta_rule_samples import WIDE_HEADS, WIDEST_HEAD
from veomni_fla.delta_rules import Call, adapted, even
from veomni_fla.loading import of_fla, of_library
from veomni_fla.pinned import pinned

_MODULE, _NAME = "ops.gated_delta_rule.chunk", "chunk_gated_delta_rule"


def fla() -> Call:
    """fla's function, with its Triton kernels throughout.

    Raises:
        ImportError: fla can't be imported.
    """
    return adapted("fla", pinned(of_fla(_MODULE, _NAME)), check_call, even, on_host=True)


def fla_tilelang() -> Call:
    """The same, with fla's TileLang kernel for the gradients of queries, keys and decays.

    Raises:
        ImportError: fla or TileLang can't be imported.
    """
    gradients = of_fla("ops.common.backends.tilelang.chunk_bwd", "chunk_bwd_dqkwg_tilelang")
    library = pinned(of_fla(_MODULE, _NAME), {"chunk_bwd_dqkwg": gradients})
    return adapted("fla_tilelang", library, check_call, even, on_host=True)


def flash_qla() -> Call:
    """FlashQLA's function. It divides a long sequence into parts, and forgets what decayed to less than ``exp(-10)``.

    Raises:
        ImportError: FlashQLA can't be imported, which on another GPU than it is for it can't.
    """
    library = pinned(of_library("flash-qla", "flash_qla.ops.gated_delta_rule.chunk", _NAME))
    return adapted("flash_qla", library, check_call, _one_tile, on_host=False)


def _one_tile(width: int) -> int:
    if width > WIDEST_HEAD:
        raise ValueError(f"flash_qla does not compute {WIDE_HEADS}: it takes heads of up to {WIDEST_HEAD}, not {width}")
    return WIDEST_HEAD
