"""What each ``train.precision`` means, and which ``model.dtype`` agrees with it."""

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
