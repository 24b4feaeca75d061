"""attention by FlashAttention 3 (the package flash-attn-3), on SM90.

Its source as flash-attn 2.8.3 ships it tells ``torch.compile`` nothing of its operators; later source does.
"""

from __future__ import annotations

from typing import Any

from flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from torch import Tensor

from veomni_core.sites.attention import MASK_INTERFACE
from veomni_flash_attn.by_lengths import attend
from veomni_flash_attn.public_functions import PublicFunctions

_LIBRARY = PublicFunctions("flash_attention_3", flash_attn_func, flash_attn_varlen_func, drops_out=False)


def standard(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """``query[B, Hq, S, D]``, ``key[B, Hk, L, D]``, ``value[B, Hk, L, D]`` to ``[B, S, Hq, D]``, and no weights.

    Options, and what is raised: :func:`veomni_flash_attn.by_lengths.attend`.
    """
    return attend(_LIBRARY, module, query, key, value, attention_mask, **options)


setattr(standard, MASK_INTERFACE, "flash_attention_2")
