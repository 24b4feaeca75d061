"""For trainers that compute their losses from the model's outputs: the model's own losses are left eager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veomni_core.errors import ConfigError

_LOSSES = ("cross_entropy_loss_implementation", "load_balancing_loss_implementation")

LOGPROBS = "token_logprobs_implementation"


def with_eager_losses(config: Mapping[str, Any], trainers: str) -> dict[str, Any]:
    """The config with the model's losses eager, since ``trainers`` compute theirs themselves.

    Raises:
        ConfigError: a kernel is named for one of the losses. It would never run.
    """
    if named := [f"{field}: {config[field]}" for field in _LOSSES if config.get(field, "eager") != "eager"]:
        raise ConfigError(
            f"{trainers} compute the loss themselves, so these kernels would never run: {', '.join(named)}. "
            "Leave them out"
        )
    return {**config, **dict.fromkeys(_LOSSES, "eager")}


def with_log_probabilities(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with ``auto`` for ``token_logprobs``, where it is not written and a preset fills other fields."""
    return dict(config) if config.get("preset", "auto") == "eager" else {LOGPROBS: "auto", **config}
