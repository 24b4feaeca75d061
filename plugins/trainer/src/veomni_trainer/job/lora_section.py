"""The section ``lora``: an adapter is trained over frozen weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from veomni_trainer.job.parameter_groups import Tower
from veomni_trainer.job.section import Number, Section


class LoraSection(Section):
    """Which adapter PEFT puts where. Defaults are PEFT's, apart from ``target_modules``."""

    rank: int = Field(default=8, ge=1)
    """The rank of the adapter's matrices (PEFT's ``r``)."""
    alpha: Annotated[int, Field(ge=1)] | Annotated[Number, Field(gt=0.0)] = 8
    """The adapter is scaled by ``alpha / rank`` (PEFT's ``lora_alpha``)."""
    dropout: Number = Field(default=0.0, ge=0.0, lt=1.0)
    """The dropout before the adapter (PEFT's ``lora_dropout``)."""
    target_modules: str | list[str] = "all-linear"
    """Names of the linears that get an adapter, a regular expression of whole paths, or ``all-linear``: all but the
    head, of the text decoder."""
    towers: list[Tower] = Field(default_factory=list)
    """The other parts of a model of images, video or audio that ``all-linear`` is to adapt too."""
    exclude_modules: str | list[str] | None = None
    """Those of them that get none."""
    target_parameters: list[str] | None = None
    """Names of parameters that get one, for weights that are no linears', such as ``mlp.experts.down_proj``."""
    modules_to_save: list[str] | None = None
    """Names of modules that are trained whole, and saved with the adapter."""
    use_rslora: bool = False
    """Whether the scale is ``alpha / sqrt(rank)``."""
    use_dora: bool = False
    """Whether the weights' magnitude is trained apart from their direction (DoRA)."""
    init_lora_weights: bool | Literal["gaussian"] = True
    """How the adapter starts: ``true`` and ``gaussian`` start as the model, ``false`` starts at random."""
    quantization: Literal["nf4", "fp4"] | None = None
    """In which type bitsandbytes holds the frozen linears (QLoRA)."""
