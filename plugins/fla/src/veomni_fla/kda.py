"""kda by flash-linear-attention's ``chunk_kda``."""

from __future__ import annotations

from veomni_core.ops.kda import check_call
from veomni_fla.delta_rules import Call, adapted, even
from veomni_fla.loading import of_fla
from veomni_fla.pinned import pinned


def fla() -> Call:
    """fla's function, with its Triton kernels throughout, and gates of any size.

    Raises:
        ImportError: fla can't be imported.
    """
    return adapted("fla", pinned(of_fla("ops.kda.chunk", "chunk_kda")), check_call, even, on_host=True)
