"""Where the attention kernels can't run, by what the sites of a plan say. Imports neither torch nor a library."""

from __future__ import annotations

from veomni_core import Site

WIDEST_HEAD, MULTIPLE = 256, 8  # of FlashAttention 2 and 3
WIDEST_HEAD_4 = 192
NARROWEST_FLEX_HEAD = 16


def flash_attention(site: Site, widest: int = WIDEST_HEAD) -> str:
    """Why no FlashAttention can run at ``site``; empty if it can."""
    unfit = [width for width in _widths(site) if width % MULTIPLE or width > widest]
    if not unfit:
        return ""
    return f"takes heads of {MULTIPLE} to {widest} in multiples of {MULTIPLE}, this site has {_shown(unfit)}"


def flash_attention_4(site: Site) -> str:
    """Why FlashAttention 4 can't run at ``site``; empty if it can."""
    return flash_attention(site, WIDEST_HEAD_4)


def flex_attention(site: Site) -> str:
    """Why FlexAttention can't run at ``site``; empty if it can."""
    unfit = [width for width in _widths(site) if width < NARROWEST_FLEX_HEAD]
    return f"takes heads of at least {NARROWEST_FLEX_HEAD}, this site has {_shown(unfit)}" if unfit else ""


def _widths(site: Site) -> list[int]:
    return sorted({*site.sizes.get("head_dim", ()), *site.sizes.get("value_head_dim", ())})


def _shown(widths: list[int]) -> str:
    return " and ".join(map(str, widths))
