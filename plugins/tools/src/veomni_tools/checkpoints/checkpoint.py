"""A checkpoint beside the model of its config: what each stored tensor is for, and how experts are stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from veomni_core.errors import CheckpointError, ConfigError
from veomni_tools.checkpoints.converted_files import ConvertedFiles
from veomni_tools.checkpoints.experts import ExpertParameter, Layout, expert_parameters, one_expert
from veomni_tools.checkpoints.weight_files import WeightFiles
from veomni_transformers.build import build_skeleton
from veomni_transformers.jobs.model_config import load_model_config
from veomni_transformers.plugin_models import converter_for, is_converted_by_plugin

_COPIES = ("Force16BytesAlignment",)  # of older versions of transformers


@dataclass
class StoredExperts:
    """One expert parameter of the model as a checkpoint stores it.

    Attributes:
        parameter: the model's parameter.
        stem: the path of the experts in the stored names, which need not be the model's.
        whole: the name of the one stored tensor; empty if each expert has its own.
        each: the names of one expert's tensors, by expert and half.
        layout: how it is stored; ``None`` where its shape is square and nothing else says it.
    """

    parameter: ExpertParameter
    stem: str
    whole: str = ""
    each: dict[tuple[int, int], str] = field(default_factory=dict)
    layout: Layout | None = None

    def missing(self) -> list[str]:
        """The names of tensors of single experts that are not stored."""
        if self.whole:
            return []
        wanted = ((e, h) for e in range(self.parameter.shape[0]) for h in range(len(self.parameter.leaves)))
        return [f"{self.stem}.{e}.{self.parameter.leaves[h]}" for e, h in wanted if (e, h) not in self.each]

    def names(self) -> list[str]:
        """The stored tensors."""
        return [self.whole] if self.whole else list(self.each.values())


class Checkpoint:
    """The weights in a folder, and the model that they are for, on the meta device.

    Args:
        folder: a folder of safetensors files.
        config: the model's config, or a folder with one; by default the folder's own.
        trust_remote_code: whether code that comes with the model may run.
        square: the layout of experts whose shape doesn't say it.

    Attributes:
        experts: how each expert parameter is stored, by its name in the model.
        others: the model's name of each other tensor, by its stored name. Several stored tensors may be for one.
        extra: stored tensors that the model has no place for.
        missing: the model's parameters that nothing is stored for, and single experts.
        misshapen: stored tensors whose shape is not that of the model, each with both.

    Raises:
        CheckpointError: as of :class:`WeightFiles`.
        ConfigError, JobFileError: there is no config, or no model can be built from it.
    """

    def __init__(
        self,
        folder: Path,
        config: Path | None = None,
        trust_remote_code: bool = False,
        square: Layout | None = None,
    ) -> None:
        self.files: WeightFiles = WeightFiles(folder)
        read = load_model_config(str(config or folder), trust_remote_code=trust_remote_code)
        self.quantization = _quantization(read, self.files)
        self.model: Any = build_skeleton(read, trust_remote_code=trust_remote_code)
        if is_converted_by_plugin(self.model, folder):
            self.files = ConvertedFiles(folder, lambda: converter_for(self.model))  # type: ignore[arg-type,return-value]
        self.parameters = expert_parameters(self.model)
        self.experts: dict[str, StoredExperts] = {}
        self.others: dict[str, str] = {}
        self.extra: list[str] = []
        self.misshapen: list[str] = []
        self._shapes = {name: tuple(each.shape) for name, each in self.model.state_dict().items()}
        self._renames = _Renames(self.model, self._shapes)
        for name in sorted(self.files.tensors, key=dot_natural_key):
            self._place(name)
        for stored in self.experts.values():
            stored.layout = self._layout(stored)
        for stored in self.experts.values():
            stored.layout = stored.layout or self._layout_of_a_square(stored, square)
        self.missing = [*self._missing()]

    @property
    def converter(self) -> str:
        """The class of the plugin's converter that reads some of the stored tensors; empty if none does."""
        return self.files.converter if isinstance(self.files, ConvertedFiles) else ""

    @property
    def layouts(self) -> dict[str, Layout | None]:
        """The layout of the experts, by the path of their module."""
        found: dict[str, Layout | None] = {}
        for stored in self.experts.values():
            if len(stored.parameter.shape) == 3 or stored.layout is Layout.PER_EXPERT:
                path = stored.parameter.module
                found[path] = stored.layout if found.get(path, stored.layout) is stored.layout else None
        return found

    def refuse_incomplete_experts(self) -> None:
        """Raise CheckpointError unless every expert of the model is there, in a layout that is known."""
        missing = [name for stored in self.experts.values() for name in stored.missing()]
        missing += [name for name in self.parameters if name not in self.experts]
        if missing:
            raise CheckpointError(f"{self.files.folder}: experts are missing: {_some(missing)}. Copy the files again")
        if surplus := [name for name in self.extra if one_expert(name) and self._renames(name)[0] in self.parameters]:
            raise CheckpointError(
                f"{self.files.folder}: the model has no such experts: {_some(surplus)}. Use the config of these weights"
            )
        wrong = [each for each in self.misshapen if each.partition(" ")[0] in self._expert_names()]
        if wrong:
            raise CheckpointError(f"{self.files.folder}: experts have other shapes than the model's: {_some(wrong)}")
        if undecided := [stored for stored in self.experts.values() if stored.layout is None]:
            raise CheckpointError(
                f"{self.files.folder}: {undecided[0].whole} is square, and nothing beside it says whether it is stored "
                f"transposed. Write how it is stored: --square {Layout.FUSED} or --square {Layout.FUSED_TRANSPOSED}"
            )

    def refuse_quantized(self, what: str) -> None:
        """Raise ConfigError if the weights are quantized."""
        if self.quantization:
            raise ConfigError(
                f"{self.files.folder} holds weights quantized by {self.quantization}: their scales belong to the "
                f"layout, so veomni checkpoint {what} takes weights in full precision alone. Dequantize them first"
            )

    def _expert_names(self) -> set[str]:
        return {name for stored in self.experts.values() for name in stored.names()}

    def _place(self, name: str) -> None:
        one = one_expert(name)
        if one and self._place_one(name, *one):
            return
        target, pattern = self._renames(name)
        parameter = self.parameters.get(target)
        if parameter and name.endswith(f".{parameter.leaf}") and self._renames.keeps_values(pattern):
            stored = self.experts.setdefault(target, StoredExperts(parameter, name.removesuffix(f".{parameter.leaf}")))
            if stored.each:
                raise CheckpointError(f"{self.files.folder} stores {name} twice: whole, and one expert at a time")
            stored.whole = name
            return
        if target in self._shapes and not (one and parameter):  # an expert that the model does not have
            self.others[name] = target if pattern is None else f"{target} <- {pattern}"
            shape = self.files.tensors[name].shape
            if pattern is None and shape != self._shapes[target]:
                self.misshapen.append(f"{name} {_shown(shape)} (the model: {_shown(self._shapes[target])})")
        else:
            self.extra.append(name)

    def _place_one(self, name: str, stem: str, expert: int, leaf: str) -> bool:
        """Whether ``name`` is one expert's tensor of an expert parameter of the model."""
        if name != f"{stem}.{expert}.{leaf}" or expert < 0:  # experts.01 would take the place of experts.1
            return False
        down, _ = self._renames(f"{stem}.down_proj")
        path = down.removesuffix("down_proj")
        for first in ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"):
            parameter = self.parameters.get(path + first)
            if parameter and leaf in parameter.leaves and expert < parameter.shape[0]:
                stored = self.experts.setdefault(parameter.name, StoredExperts(parameter, stem))
                if stored.whole:
                    raise CheckpointError(f"{self.files.folder} stores {stored.whole} twice: whole, and {name}")
                stored.each[expert, parameter.leaves.index(leaf)] = name
                return True
        return False

    def _layout(self, stored: StoredExperts) -> Layout | None:
        parameter, tensors = stored.parameter, self.files.tensors
        if not stored.whole:
            wanted = parameter.stored_shape(Layout.PER_EXPERT)
            self.misshapen += [
                f"{name} {_shown(tensors[name].shape)} (the model: {_shown(wanted)})"
                for name in stored.each.values()
                if tensors[name].shape != wanted
            ]
            return Layout.PER_EXPERT
        shape = tensors[stored.whole].shape
        fit = [each for each in (Layout.FUSED, Layout.FUSED_TRANSPOSED) if parameter.stored_shape(each) == shape]
        if not fit:
            either = " or ".join(
                _shown(parameter.stored_shape(each)) for each in (Layout.FUSED, Layout.FUSED_TRANSPOSED)
            )
            self.misshapen.append(f"{stored.whole} {_shown(shape)} (the model: {either})")
            return parameter.own_layout
        if len(shape) == 2:  # biases of all experts have one form
            return parameter.own_layout
        return fit[0] if len(fit) == 1 else None

    def _layout_of_a_square(self, stored: StoredExperts, square: Layout | None) -> Layout | None:
        """What the file's own metadata, then the experts' other projection, then ``square`` says."""
        mark = self.files.marks.get(self.files.tensors[stored.whole].file)
        if mark in (Layout.FUSED, Layout.FUSED_TRANSPOSED):
            return Layout(mark)
        for other in self.experts.values():
            is_beside = other.parameter.module == stored.parameter.module and len(other.parameter.shape) == 3
            if is_beside and other.whole and not other.parameter.is_square:
                return other.layout
        return square

    def _missing(self) -> Iterator[str]:
        covered = {each.partition(" <- ")[0] for each in self.others.values()} | {*self.experts}
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        ignored = [re.compile(each) for each in getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ()]
        for name in self._shapes:
            is_tied = name in tied and tied[name] in covered
            produced = any(name in self._renames.targets(each) for each in self.others.values() if " <- " in each)
            if name not in covered and not is_tied and not produced and not any(each.search(name) for each in ignored):
                yield name
        for stored in self.experts.values():
            yield from stored.missing()


class _Renames:
    """Stored names to the model's, by transformers' own conversion of this model."""

    def __init__(self, model: Any, shapes: dict[str, Any]) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._prefix, self._shapes = model.base_model_prefix, shapes

    def __call__(self, name: str) -> tuple[str, str | None]:
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._shapes)
        if renamed not in self._shapes and name in self._shapes:
            return rename_source_key(name, [], [], self._prefix, self._shapes)  # type: ignore[no-any-return]
        return renamed, pattern

    def keeps_values(self, pattern: str | None) -> bool:
        """Whether the conversion that ``pattern`` belongs to does nothing, or transposes by shape."""
        done = () if pattern is None else self._by_pattern[pattern].operations
        return all(getattr(each, "check_dims", False) or type(each).__name__ in _COPIES for each in done)

    def targets(self, place: str) -> list[str]:
        """All parameters that the conversion of a tensor produces, of which ``place`` names the first."""
        name, _, pattern = place.partition(" <- ")
        first, *more = self._by_pattern[pattern].target_patterns
        return [name.replace(first, each) for each in (first, *more)]


def _quantization(config: Any, files: WeightFiles) -> str:
    """The method by which weights are quantized; empty if they aren't."""
    said = getattr(config, "quantization_config", None)
    if said:
        said = said if isinstance(said, Mapping) else said.to_dict()
        return str(said.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in said else "an unnamed method"))
    for tensor in files.tensors.values():
        if tensor.name.endswith((".absmax", ".quant_map")) or ".quant_state." in tensor.name:
            return "bitsandbytes"
        if tensor.dtype.startswith("F8_") or tensor.name.endswith("_scale_inv"):
            return "fp8"
        if tensor.name.endswith(("_blocks", ".qweight", ".qzeros")):
            return "blocks of few bits"
    return ""


def _shown(shape: tuple[int, ...]) -> str:
    return json.dumps(list(shape))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
