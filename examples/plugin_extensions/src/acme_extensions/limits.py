"""Where the kernels can't run, by the sizes of a site. Imports no torch."""

from __future__ import annotations

from veomni_core import Site

_MOST_EXPERTS = 64


def moe_experts(site: Site) -> str:
    """Why the experts' kernel can't run at ``site``; empty if it can."""
    experts = max(site.sizes.get("experts", (0,)))
    return "" if experts <= _MOST_EXPERTS else f"takes at most {_MOST_EXPERTS} experts, this site has {experts}"
