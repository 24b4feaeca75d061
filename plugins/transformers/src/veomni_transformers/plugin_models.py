"""Models that plugins bring (``veomni_models``): their classes, and how their checkpoints are read.

Nothing is registered with transformers, whose tables belong to the whole process: a model is found here by its type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoProcessor, AutoTokenizer

from veomni_core.descriptions.references import load_attribute
from veomni_core.discovery.discover import discover
from veomni_core.errors import CheckpointError, ConfigError, SpecError
from veomni_transformers.model_spec import ModelSpec

_OF_A_CLASS = "_create_checkpoint_tensor_converter"  # VeOmni's name, which generated classes have


@dataclass(frozen=True)
class ConvertedCheckpointTensor:
    """A tensor under the model's name."""

    name: str
    tensor: Tensor


class CheckpointTensorConverter(Protocol):
    """Turns stored tensors into a model's, one at a time. A new one is made for each checkpoint that is read."""

    def can_handle(self, name: str) -> bool:
        """Whether it takes the stored tensor ``name``; others are read as they are."""

    def convert(
        self, name: str, tensor: Tensor
    ) -> ConvertedCheckpointTensor | Sequence[ConvertedCheckpointTensor] | None:
        """The model's tensor, or several; ``None`` if it waits for more stored ones.

        ``veomni checkpoint`` passes tensors on the meta device first, for names and shapes.
        """

    def finalize(self) -> list[ConvertedCheckpointTensor]:
        """What is left when all have been seen; raises if stored tensors are missing for it."""


def plugin_model(model_type: str) -> ModelSpec | None:
    """What a plugin says of this model type; ``None`` if none does.

    Raises:
        ConfigError: a plugin brings classes for a type that transformers has.
    """
    spec = discover().models.get(model_type)
    if spec is not None and spec.model and model_type in CONFIG_MAPPING:
        raise ConfigError(
            f"model_type {model_type} is transformers' own, and a plugin brings {spec.model} for it. Name the plugin's "
            "model by another type, or block the plugin with VEOMNI_PLUGINS_BLOCK"
        )
    return spec


def config_class_of(model_type: str) -> Any | None:
    """The class of a config that a plugin brings for a type that transformers doesn't have."""
    spec = plugin_model(model_type)
    return _loaded(spec, "config") if spec and spec.config else None


def model_class_of(config: Any) -> Any | None:
    """The class of a plugin's model, whose plans for several ranks ``config`` then has."""
    spec = plugin_model(config.model_type)
    if spec is None or not spec.model:
        return None
    if spec.parallel_plan:
        plans = _loaded(spec, "parallel_plan")
        if hasattr(plans := plans() if callable(plans) else plans, "ep_styles"):  # a ParallelPlan
            of_model = f"{_loaded(spec, 'model').base_model_prefix}."  # a config's plan begins within
            plans = {"ep": {path.removeprefix(of_model): style for path, style in plans.ep_styles().items()}}
        if not isinstance(plans, Mapping) or not {*plans} <= {"tp", "ep"}:
            raise SpecError(f"ModelSpec {spec.model_type!r}: parallel_plan must have the keys tp and ep, not {plans!r}")
        for kind, styles in plans.items():
            setattr(config, f"base_model_{kind}_plan", dict(styles))
    return _loaded(spec, "model")


def tokenizer_in(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer in ``folder``: of a plugin's class, if it has one for the model there, else ``AutoTokenizer``'s."""
    return _from_folder("tokenizer", AutoTokenizer, folder, trust_remote_code)


def processor_in(folder: Path, trust_remote_code: bool = False) -> Any:
    """The processor in ``folder``: of a plugin's class, if it has one for the model there, else ``AutoProcessor``'s."""
    return _from_folder("processor", AutoProcessor, folder, trust_remote_code)


def _from_folder(field: str, auto: Any, folder: Path, trust: bool) -> Any:
    try:
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        model_type = None
    spec = plugin_model(model_type) if isinstance(model_type, str) and model_type not in CONFIG_MAPPING else None
    kind = _loaded(spec, field) if spec and getattr(spec, field) else auto
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)


def converter_for(model: Any) -> CheckpointTensorConverter | None:
    """A new converter of checkpoints for ``model``: of its class, else of a plugin; ``None`` where there is none.

    Raises:
        SpecError: it lacks a method of :class:`CheckpointTensorConverter`.
    """
    make = getattr(type(model), _OF_A_CLASS, None)
    if make is None and (spec := plugin_model(model.config.model_type)) and spec.converter:
        make = _loaded(spec, "converter")
    converter = make(model) if make else None
    for method in ("can_handle", "convert", "finalize"):
        if converter is not None and not callable(getattr(converter, method, None)):
            raise SpecError(f"the converter of {type(model).__name__}'s checkpoints, {converter!r}, has no {method}()")
    return converter  # type: ignore[no-any-return]


def is_converted_by_plugin(model: Any, folder: Path) -> bool:
    """Whether the model has a converter that takes one of the tensors in ``folder``. Reads headers alone."""
    converter = converter_for(model)
    return converter is not None and any(
        handles(converter, name, folder) for file in folder.glob("*.safetensors") for name in _names(file)
    )


def handles(converter: CheckpointTensorConverter, name: str, folder: Path) -> bool:
    """Whether ``converter`` takes the stored tensor ``name`` of ``folder``.

    Raises:
        CheckpointError: the converter fails.
    """
    try:
        return bool(converter.can_handle(name))
    except Exception as error:  # whatever a plugin's code raises
        why = f"can_handle({name!r}) failed: {type(error).__name__}: {error}"
        raise CheckpointError(f"{folder} can't be read by {type(converter).__name__}: {why}") from error


def refuse_converted(folder: Path, converts: bool) -> None:
    """Raise if tensors that a plugin converts would be divided over ranks, or quantized, while they are read."""
    if converts:
        raise CheckpointError(
            f"{folder} is read by a plugin's converter, which needs whole tensors. Load it once by "
            "build_foundation_model, without distributed_config and quantization_config, and save_pretrained it: then "
            "it is stored as the model has it"
        )


def converted_by_plugin(model: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors of the safetensors files in ``folder`` by the model's names, as its converter gives them.

    What the converter doesn't take is still in its file.

    Raises:
        CheckpointError: as :func:`run_converter`.
        SpecError: as :func:`converter_for`.
    """
    converter = converter_for(model)
    assert converter is not None
    return {each.name: each.tensor for each in run_converter(converter, _stored(folder), folder)}


def run_converter(
    converter: CheckpointTensorConverter, stored: Iterable[tuple[str, Tensor]], folder: Path
) -> Iterator[ConvertedCheckpointTensor]:
    """The ``stored`` tensors of ``folder`` under the model's names; those that the converter doesn't take, as they are.

    Raises:
        CheckpointError: the converter fails, or gives a tensor twice.
    """
    found = set()
    try:
        for each in _converted(converter, stored):
            if not (isinstance(getattr(each, "name", None), str) and isinstance(getattr(each, "tensor", None), Tensor)):
                raise TypeError(f"it gives {each!r}, and is to give ConvertedCheckpointTensor(name, tensor)")
            if each.name in found:
                raise CheckpointError(f"{folder}: {each.name} is there twice once it is converted")
            found.add(each.name)
            yield each
    except CheckpointError:
        raise
    except Exception as error:  # whatever a plugin's code raises
        raise CheckpointError(f"{folder} can't be read by {type(converter).__name__}: {error}") from error


def _converted(
    converter: CheckpointTensorConverter, stored: Iterable[tuple[str, Tensor]]
) -> Iterator[ConvertedCheckpointTensor]:
    for name, tensor in stored:
        if not converter.can_handle(name):
            yield ConvertedCheckpointTensor(name, tensor)
        elif (given := converter.convert(name, tensor)) is not None:
            yield from given if isinstance(given, (list, tuple)) else (given,)
    yield from converter.finalize() or ()


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in list(stored.keys()):
                yield name, stored.get_tensor(name)


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as stored:
        return list(stored.keys())


def _loaded(spec: ModelSpec, field: str) -> Any:
    reference = getattr(spec, field)
    try:
        return load_attribute(reference)
    except Exception as error:  # whatever the import of a plugin raises
        raise SpecError(
            f"ModelSpec {spec.model_type!r}: {field} {reference} can't be loaded: {type(error).__name__}: {error}"
        ) from error
