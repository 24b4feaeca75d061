"""What the trainer of a method is given besides the model and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class MethodInputs:
    """What a method's trainer is given.

    Attributes:
        tokenizer: for the rows, and for completions.
        reference: the model before training, if the method needs one.
        rewards: the functions that judge completions.
        longest: the most tokens of a text.
    """

    tokenizer: PreTrainedTokenizerBase
    reference: PreTrainedModel | None = None
    rewards: tuple[Any, ...] = ()
    longest: int = 0
