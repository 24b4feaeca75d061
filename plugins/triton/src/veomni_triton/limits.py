"""Where the Triton kernels can't run, by what the sites of a plan say. Imports neither torch nor triton."""

from __future__ import annotations

from veomni_core import Site

# A program holds the keys, or the values, of a chunk as one tile.
MAX_HEAD_WIDTH = 256


def chunk_gated_delta_rule(site: Site) -> str:
    """Why ``triton`` can't compute the gated delta rule at ``site``; empty if it can."""
    widest = max((*site.sizes.get("key_width", ()), *site.sizes.get("value_width", ())), default=0)
    return (
        "" if widest <= MAX_HEAD_WIDTH else f"takes heads of at most {MAX_HEAD_WIDTH} columns, this site has {widest}"
    )
