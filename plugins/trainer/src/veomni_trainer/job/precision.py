"""What each ``train.precision`` means, which ``model.dtype`` agrees with it, and what a trained parameter costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["bf16_mixed", "bf16", "fp16_mixed", "float32"]


@dataclass(frozen=True)
class Precision:
    """How numbers are held and computed.

    Attributes:
        weights: the dtype of weights, gradients and optimizer states.
        autocast: the dtype of the ``torch.autocast`` that the forward runs under; ``None`` for none.
    """

    weights: str
    autocast: str | None = None


PRECISIONS: Mapping[PrecisionName, Precision] = {
    "bf16_mixed": Precision("float32", "bfloat16"),
    "bf16": Precision("bfloat16"),
    "fp16_mixed": Precision("float32", "float16"),
    "float32": Precision("float32"),
}
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_OF_A_BLOCK = 4 / 256  # bitsandbytes keeps a float32 scale for each block of 256 values
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


def gradient_and_state_bytes(precision: PrecisionName, optimizer: str) -> tuple[float, float]:
    """The bytes of a trained parameter's gradient, and of what ``optimizer`` remembers of it with default options.

    They are those of a large matrix. Small ones differ a little: Adafactor keeps two vectors for a matrix, which are
    not counted; 8-bit optimizers keep float32 states for tensors of less than 4096 values and for embeddings; Muon's
    are those of a hidden matrix, while embeddings, the head, norms and experts have AdamW's.
    """
    weight = _BYTES[PRECISIONS[precision].weights]
    family = max((name for name in _STATES if optimizer.removeprefix("paged_").startswith(name)), key=len)
    size = next((size for end, size in _SIZES.items() if optimizer.endswith(end)), weight)
    return weight, _STATES[family] * size


def check_dtype(dtype: str | None, precision: PrecisionName | None, freezes_weights: bool) -> None:
    """Check ``model.dtype``, which a job may leave out, against ``train.precision``.

    Args:
        dtype: the job's ``model.dtype``.
        precision: the job's ``train.precision``; without it the machine decides between two with float32 weights.
        freezes_weights: whether the model's weights stay as they are (LoRA). Then they may be bfloat16 under any
            precision, since no update is lost in them.

    Raises:
        ValueError: they contradict each other.
    """
    weights = PRECISIONS[precision].weights if precision else "float32"
    if dtype in (None, weights) or (freezes_weights and dtype == "bfloat16"):
        return
    if dtype == "float16":
        raise ValueError(
            "model.dtype: float16 holds nothing below 6e-8, so weights, gradients and optimizer states in it lose "
            "small updates; remove model.dtype, and write train.precision: fp16_mixed to compute in float16 on float32 "
            "weights"
        )
    wanted = {"bfloat16": "bf16", "float32": "bf16_mixed or float32"}[str(dtype)]
    said = f"train.precision: {precision} trains" if precision else "a job without train.precision trains"
    raise ValueError(
        f"model.dtype is {dtype}, but {said} {weights} weights; remove model.dtype, or write train.precision: {wanted}"
    )
