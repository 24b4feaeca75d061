"""Where the Triton kernels can't run, by what the sites of a plan say. Imports neither torch nor triton."""

from __future__ import annotations

from veomni_core import Site

# The top k are ranked by integers that hold an expert's number in the 13 bits that a float16 leaves unused in float32.
MAX_EXPERTS = 2**13


def load_balancing_loss(site: Site) -> str:
    """Why ``triton`` can't compute the load-balancing loss at ``site``; empty if it can."""
    most = max(site.sizes.get("experts", ()), default=0)
    return "" if most <= MAX_EXPERTS else f"ranks at most {MAX_EXPERTS} experts, this site has {most}"
