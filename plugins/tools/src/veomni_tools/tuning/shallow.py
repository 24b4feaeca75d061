"""The model that is measured: as wide as the job's, with as few layers as have all kinds of its sites."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from veomni_core.errors import VeOmniError
from veomni_tools.tuning.survey import Survey, Surveyed
from veomni_transformers.build import build_skeleton, build_unbound


def shallow_model(skeleton: Any, surveyed: Iterable[Surveyed], survey: Survey, device: str, **how: Any) -> Any:
    """A model with random weights on ``device`` that has every kind of site of ``skeleton``.

    Args:
        skeleton: the job's model, on the meta device.
        surveyed: its kinds of sites.
        survey: finds those of models with fewer layers.
        device: where it is made.
        how: ``trust_remote_code`` and ``modeling``, as of ``build_skeleton``.
    """
    wanted = {each.kind for each in surveyed}
    options = {"trust_remote_code": False, **how, "torch_dtype": skeleton.dtype}
    for config in _shortened(skeleton.config):
        try:
            found = {each.kind for each in survey.of(build_skeleton(config, **options))}
        except VeOmniError:  # so few layers are no model of this type
            continue
        if wanted <= found:
            return build_unbound(config, device, **options)
    return build_unbound(skeleton.config, device, **options)


def _shortened(config: Any) -> Iterator[Any]:
    """Copies of ``config`` with 1, 2, 4, ... layers, fewer than it has. Lists with an entry per layer are cut."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    depth = 1
    while depth < layers:
        short = copy.deepcopy(config)
        text = short.get_text_config()
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == layers:
                setattr(text, name, value[:depth])
        text.num_hidden_layers = depth
        yield short
        depth *= 2
