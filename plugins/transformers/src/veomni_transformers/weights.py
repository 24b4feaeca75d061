"""Loads the weights of a folder into a model, and refuses those that are damaged or don't fit it, by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, GenerationConfig

from veomni_core.errors import CheckpointError
from veomni_transformers.jobs.model_config import load_model_config
from veomni_transformers.sharded_build import draw_whole


def check_weights(path: Path) -> None:
    """Raise CheckpointError unless ``path`` is a folder with whole safetensors files. Reads their headers alone."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files:
        raise CheckpointError(f"{path}: expected a folder with *.safetensors files")
    for index in path.glob("*.safetensors.index.json"):
        files += _files_in(index)
    damaged = {file.name: problem for file in dict.fromkeys(files) if (problem := _damage(file))}
    if damaged:
        listed = "; ".join(f"{name} {problem}" for name, problem in damaged.items())
        raise CheckpointError(f"{path}: {listed}. Copy or download the files again")


def _files_in(index: Path) -> list[Path]:
    """The files that an index of weights names."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [index.parent / name for name in dict.fromkeys(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of weights: {type(error).__name__}: {error}") from error


def _damage(file: Path) -> str:
    try:
        with safe_open(file, "pt"):
            return ""
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: a name that no path can have
        return f"is damaged or truncated ({error})"


def check_names(model_class: Any, config: Any, path: Path, trust: bool, new_head: bool) -> None:
    """Raise CheckpointError, as :func:`load_weights` does, if the tensors are not those of the model.

    Reads the files' headers alone. What can't be loaded without values is left to :func:`load_weights`.
    """
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if getattr(config, "quantization_config", None) or not (whole.is_file() or index.is_file()):
        return
    tensors: dict[str, list[int]] = {}
    for file in [whole] if whole.is_file() else _files_in(index):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    meta = torch.device("meta")
    given = {"state_dict": {name: torch.empty(shape, device=meta) for name, shape in tensors.items()}}
    try:
        load_weights(model_class, config, path, torch.float32, meta, trust, given, new_head)
    except CheckpointError as error:
        if error.__cause__ is None:
            raise


def load_resized(model_class: Any, config: Any, path: Path, *others: Any) -> Any:
    """The weights in ``path`` with the number of embeddings that they have, resized to that of ``config``."""
    model = load_weights(model_class, as_stored(config, path, others[2]), path, *others)
    if model.config.get_text_config().vocab_size != (words := config.get_text_config().vocab_size):
        model.resize_token_embeddings(words)
    return model


def as_stored(config: Any, path: Path, trust: bool) -> Any:
    """A copy of ``config`` with the number of embeddings of the weights in ``path``."""
    stored = copy.deepcopy(config)
    before = load_model_config(str(path), trust_remote_code=trust) if (path / "config.json").is_file() else config
    stored.get_text_config().vocab_size = before.get_text_config().vocab_size
    return stored


def _holds_a_whole_around(path: Path, config: Any) -> bool:
    """Whether the folder's weights are those of a whole model, and ``config`` is that of a part of it."""
    if not (path / "config.json").is_file():
        return False
    stored = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
    parts = CONFIG_MAPPING[stored].sub_configs.values() if stored in CONFIG_MAPPING else ()
    return stored != config.model_type and type(config) in parts


def load_weights(
    model_class: Any,
    config: Any,
    path: Path,
    dtype: torch.dtype | str,
    device: torch.device,
    trust: bool,
    given: Mapping[str, Any],
    new_head: bool = False,
) -> Any:
    options = {name: value for name, value in given.items() if value is not None}
    # transformers' engine puts each part on its rank's accelerator
    if "distributed_config" not in options and device.type != "cpu":
        options["device_map"] = {"": device}
    if not any((path / name).exists() for name in ("config.json", "generation_config.json")):
        # A folder with weights only: transformers 5.23 looks there for generation settings and fails without them.
        options["generation_config"] = GenerationConfig.from_model_config(config)
    state = torch.get_rng_state()
    try:
        model, info = model_class.from_pretrained(
            None if "state_dict" in options else path,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that `info` names them; they are refused below
            trust_remote_code=trust,
            use_safetensors=True,  # where they are named otherwise, transformers would read a pickle beside them
            **options,
        )
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from error
    misfits = {
        what: sorted(map(str, info.get(what) or ())) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if _holds_a_whole_around(path, config):
        del misfits["unexpected_keys"]  # of the other parts; none of this one is missing
    if new_head:
        if "distributed_config" in options:
            draw_whole(model, misfits["missing_keys"], state)
        body = f"{model.base_model_prefix}."
        misfits = {what: [key for key in keys if key.startswith(body)] for what, keys in misfits.items()}
    if any(misfits.values()):
        named = "; ".join(
            f"{what.replace('_', ' ')}: {', '.join(keys[:5])}{f' and {len(keys) - 5} more' if len(keys) > 5 else ''}"
            for what, keys in misfits.items()
            if keys
        )
        raise CheckpointError(f"{path} does not fit this model: {named}")
    return model
