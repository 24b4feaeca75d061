"""Refuses packed sequences whose positions have three rows: by them transformers' attention doesn't see any begin.

Models with multimodal rotary embeddings take positions of time, height and width. With four rows the first one counts
the tokens of each sequence, and masks are built of it; with three there is none, and every token sees all before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from veomni_core.binding.model_rules import WholeModelRule
from veomni_core.changes.change import Change, ForwardChange
from veomni_core.discovery.registry import Registry
from veomni_core.errors import PackedSequencesError
from veomni_core.planning.plan import Plan
from veomni_transformers.proving.functions import current_forward

_SECTIONS = "mrope_section"


class ThreeRows(WholeModelRule):
    """Changes nothing in a model whose positions have one row."""

    def changes(self, model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
        """A forward that looks at positions of three rows where it is given some."""
        forward = current_forward(model)
        if has_sections(model) and "position_ids" in inspect.signature(forward).parameters:
            yield "", ForwardChange(model, refusing_three_rows(forward))


def has_sections(model: nn.Module) -> bool:
    """Whether the rotary embeddings of ``model`` have sections for time, height and width."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return False
    settings = getattr(config.get_text_config(), "rope_parameters", None)
    return bool(settings and _SECTIONS in settings)


def refusing_three_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, a model's function of ``self``, that raises PackedSequencesError for positions that start again."""
    names = list(inspect.signature(forward).parameters)[1:]

    @wraps(forward)
    def in_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        positions = given.get("position_ids")
        if (
            isinstance(positions, Tensor)
            and positions.dim() == 3
            and len(positions) == 3
            and given.get("attention_mask") is None  # padding, which a mask leaves out, may say anything
            and (positions[0].diff(dim=-1) < 0).any()  # along a sequence no token's time is before another's
        ):
            raise PackedSequencesError(
                "this step packs sequences, and their position_ids have three rows, by which transformers' "
                f"attention doesn't keep them apart in {type(self).__name__}. Give four rows, the first of which "
                "counts each sequence's tokens from 0, if the model takes them; or pass each sequence alone"
            )
        return forward(self, *args, **kwargs)

    return in_step
