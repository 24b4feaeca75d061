"""What each trained parameter costs in memory, by precision and optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from veomni_trainer.job.precision import PRECISIONS, PrecisionName

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_OF_A_BLOCK = 4 / 256  # bitsandbytes keeps a float32 scale for each block of 256 values


@dataclass(frozen=True)
class ParameterBytes:
    """The bytes of one trained parameter. A frozen one costs its weight alone.

    Attributes:
        weight: the weight.
        gradient: its gradient.
        optimizer: what the optimizer remembers of it.
        autocast: its copy in autocast's dtype, which lives during a step, if it is multiplied in that dtype.
    """

    weight: float
    gradient: float
    optimizer: float
    autocast: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weight + self.gradient + self.optimizer + self.autocast


# How many values an optimizer keeps for a parameter. They have the weight's dtype, unless _SIZES says otherwise.
_STATES = {
    "muon": 1,
    "adafactor": 0,
    "sgd": 0,
    "adagrad": 1,
    "rmsprop": 1,
    "lion": 1,
    "adamw": 2,
    "stable_adamw": 2,
    "ademamix": 3,
    "grokadamw": 3,
}
_SIZES = {  # of optimizers whose name ends so, and of bitsandbytes' that have no such end
    "_4bit": 0.5 + 2 * _OF_A_BLOCK,
    "_8bit": 1 + _OF_A_BLOCK,
    "_32bit": 4.0,
    "_bnb": 4.0,
    "ademamix": 4.0,
}


def parameter_bytes(precision: PrecisionName, optimizer: str) -> ParameterBytes:
    """What a parameter of a large matrix costs under ``optimizer`` with its default options.

    Small ones differ a little: Adafactor keeps two vectors for a matrix, which are not counted; 8-bit optimizers keep
    float32 states for tensors of less than 4096 values and for embeddings; Muon's are those of a hidden matrix, while
    embeddings, the head, norms and experts have AdamW's.
    """
    numbers = PRECISIONS[precision]
    weight = _BYTES[numbers.weights]
    family = max((name for name in _STATES if optimizer.removeprefix("paged_").startswith(name)), key=len)
    size = next((size for end, size in _SIZES.items() if optimizer.endswith(end)), weight)
    autocast = _BYTES[numbers.autocast] if numbers.autocast else 0.0
    return ParameterBytes(weight, weight, _STATES[family] * size, autocast)
