"""Norms of models whose tensors are divided over ranks: on which of them a kernel runs as on a whole model."""

from __future__ import annotations

from veomni_core.sites.site import Site
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.engine.layout import refused

# The weight stays whole on every rank. With the first, each rank normalises its own heads, and the engine adds up the
# weight's gradients.
_WHOLE_STYLES = {"replicated_with_grad_allreduce", "replicate"}


def sharded_norm(site: Site, layout: EngineLayout) -> Site:
    """``site`` if its weight stays a plain tensor in forward; otherwise without a variant."""
    styles = layout.styles_at(site.path)
    if set(styles.values()) <= _WHOLE_STYLES:
        return site
    return refused(site, styles, "a norm's kernel takes plain tensors with the whole last dimension")
