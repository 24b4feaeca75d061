"""The model that is measured, and one step of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from veomni_conformance.bound_models.model_calls import SEED, draw_again
from veomni_conformance.bound_models.site_comparison import autocast_on


@dataclass(frozen=True)
class StepModel:
    """The model that is measured, and its inputs.

    Attributes:
        model: with few layers, on the device.
        inputs: of its forward.
        autocast: the dtype of ``torch.autocast``; ``None`` without it.
    """

    model: Any
    inputs: Mapping[str, Any]
    autocast: str | None

    @classmethod
    def of(cls, model: Any, batch: tuple[int, int], autocast: str | None) -> StepModel:
        """``model`` with random tokens in the shape of ``batch``, which are their own labels."""
        device, generator = next(model.parameters()).device, torch.Generator().manual_seed(SEED)
        ids = torch.randint(model.config.get_text_config().vocab_size, batch, generator=generator).to(device)
        return cls(model.train(), {"input_ids": ids, "labels": ids, "use_cache": False}, autocast)

    def run(self) -> Any:
        """One forward, as in training."""
        draw_again()
        with torch.enable_grad(), self.autocast_on():
            return self.model(**self.inputs)

    def autocast_on(self) -> Any:
        """The context of a forward."""
        return autocast_on(self.model, self.autocast)
