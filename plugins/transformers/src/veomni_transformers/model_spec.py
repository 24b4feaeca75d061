"""What a plugin's ``veomni_models`` returns. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass

from veomni_core.descriptions.field_types import check_fields
from veomni_core.errors import SpecError

_REFERENCES = ("config", "model", "tokenizer", "processor", "parallel_plan", "converter")


@dataclass(frozen=True)
class ModelSpec:
    """A model type that transformers does not have, or how its checkpoints are read.

    Args:
        model_type: as ``config.json`` names it.
        config: ``"module:attribute"`` of the config's class.
        model: the same of the model's class. Both are empty where transformers has the type, and only its checkpoints
            need the ``converter``.
        tokenizer: the same of the tokenizer's class, if transformers can't find it.
        processor: the same of the processor's class.
        parallel_plan: the same of a mapping ``{"tp": {path: style}, "ep": {path: style}}``, for several ranks; or of a
            :class:`veomni_core.ParallelPlan`, or a function that returns one.
        converter: the same of a function that takes the model, which may be on the meta device, and returns a converter
            of stored tensors (``can_handle``, ``convert``, ``finalize``).

    Raises:
        SpecError: a field is of another form, or ``config`` and ``model`` are not given together.

    Example:
        >>> spec = ModelSpec("acme", config="acme.config:AcmeConfig", model="acme.modeling:AcmeForCausalLM")
        >>> spec.model_type
        'acme'
    """

    model_type: str
    config: str = ""
    model: str = ""
    tokenizer: str = ""
    processor: str = ""
    parallel_plan: str = ""
    converter: str = ""

    def __post_init__(self) -> None:
        owner = f"ModelSpec {self.model_type!r}"
        check_fields(self, owner, names=("model_type",), optional_references=_REFERENCES)
        if bool(self.config) != bool(self.model) or not (self.model or self.converter):
            raise SpecError(f"{owner}: config and model are given together, or neither with a converter")
