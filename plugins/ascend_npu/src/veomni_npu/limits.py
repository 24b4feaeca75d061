"""Where torch_npu's operators can't run, by what the sites of a plan say. Imports no torch."""

from __future__ import annotations

from veomni_core import Site

_WIDEST_HEAD = 768


def attention(site: Site) -> str:
    """Why ``npu_fusion_attention`` can't run at ``site``; empty if it can."""
    widest = max((*site.sizes.get("head_dim", ()), *site.sizes.get("value_head_dim", ())), default=0)
    return "" if widest <= _WIDEST_HEAD else f"takes heads of at most {_WIDEST_HEAD}, this site has {widest}"
