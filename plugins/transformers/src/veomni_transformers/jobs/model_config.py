"""Turns what a job says about its model into a transformers config. Runs remote code only with trust_remote_code."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from veomni_core.discovery.discover import discover
from veomni_core.errors import ConfigError, HostError, JobFileError, UnknownNameError, did_you_mean
from veomni_transformers.jobs.config_errors import explained
from veomni_transformers.jobs.config_values import refuse_unfit_pairs, refuse_values
from veomni_transformers.jobs.hub_snapshots import is_hub_id, nearest
from veomni_transformers.jobs.job_files import shown
from veomni_transformers.plugin_models import config_class_of

_NEVER_LISTED = {"model_type", "partial_rotary_factor", "rope_scaling", "rope_theta", "torch_dtype", "auto_map"}
_NEVER_LISTED |= {"_attn_implementation", "_name_or_path"}
_READERS = ("modeling_utils", "modeling_layers", "modeling_rope_utils", "loss/loss_utils")
_IN_THE_JOB = "model.config"
ConfigSource = str | Path | Mapping[str, Any] | PretrainedConfig


def load_model_config(
    source: ConfigSource, overrides: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Load a transformers config.

    Args:
        source: a ``config.json``, a folder with one, a Hub id, a mapping, or a config (which is copied).
        overrides: keys to set in the config.
        trust_remote_code: whether code that is shipped with the model may run.

    Raises:
        UnknownNameError: neither transformers nor a plugin knows the model type, or a key of the mapping looks like a
            misspelt key of its config; the message suggests the nearest spelling.
        ConfigError: the config needs remote code that is not allowed to run, has no ``model_type``, or has values that
            its class refuses or that no model can be built with; the message names the keys.
        JobFileError: the file is missing or is not JSON.
        HostError: the config can't be fetched from the Hub.
    """
    overrides = dict(overrides or {})
    if isinstance(source, PretrainedConfig):
        config = copy.deepcopy(source)
        refuse_values(overrides, type(source), "config_kwargs.")
        with explained(f"{type(source).__name__} refuses it", overrides, "config_kwargs"):
            config.update(overrides)
        refuse_unfit_pairs(config, overrides, "config_kwargs.")
        return config
    if isinstance(source, Mapping):
        data = {**source, **overrides}
        config = _from_mapping(data, _IN_THE_JOB, trust_remote_code)
        _check_keys(data, type(config))
        return config
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise _no_config_in(path)
        path = path / "config.json"
    if path.exists() or path.suffix == ".json":
        return _from_mapping({**_read_json(path), **overrides}, str(path), trust_remote_code, path.parent)
    return _from_hub(str(source), overrides, trust_remote_code)


def _from_mapping(
    data: dict[str, Any], where: str, trust_remote_code: bool, folder: Path | None = None
) -> PretrainedConfig:
    model_type = data.get("model_type")
    if model_type is None:
        raise ConfigError(f"{where}: model_type is missing, e.g. model_type: llama")
    if not isinstance(model_type, str):
        raise ConfigError(f"{where}: model_type must be text, e.g. model_type: llama, got {shown(model_type)}")
    if "auto_map" in data and folder is not None:
        if not trust_remote_code:
            raise ConfigError(
                f"{where} asks to run code that comes with the model (auto_map). Pass trust_remote_code=True if you "
                "have read that code and trust it"
            )
        with explained("its config can't be made", data, where):
            stored = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        return _built_anew(stored, data, where)
    config_class = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else config_class_of(model_type)
    if config_class is None:
        raise UnknownNameError(f"{where}: model_type {model_type!r} is unknown. {_known_types(model_type)}")
    return _made(config_class, {key: value for key, value in data.items() if key != "model_type"}, where)


def _known_types(model_type: str) -> str:
    registry = discover()
    known = [*CONFIG_MAPPING.keys(), *registry.models]
    nearest = did_you_mean(model_type, known)
    said = nearest if nearest.startswith("Did") else f"transformers and plugins know {len(known)} types."
    failed = [f"The plugin {record.name} failed to load: {record.problem}" for record in registry.failed()]
    return " ".join([said, *failed])


def _made(config_class: type[PretrainedConfig], data: Mapping[str, Any], where: str) -> PretrainedConfig:
    from_transformers = config_class.__module__.startswith("transformers.")  # code that comes with a model may differ
    prefix = f"{where}." if where == _IN_THE_JOB else f"{where}: "
    if from_transformers:
        refuse_values(data, config_class, prefix)
    with explained(f"{config_class.__name__} refuses it", data, where):
        config = config_class.from_dict(copy.deepcopy(dict(data)))  # it completes nested mappings in place
    if from_transformers:
        refuse_unfit_pairs(config, data, prefix)
    return config


def _check_keys(data: Mapping[str, Any], config_class: type[PretrainedConfig]) -> None:
    """Refuse keys that nothing reads. transformers keeps unknown keys and would silently use the default instead.

    Models also read keys that their config class doesn't list. Such a key stands in the source of the model or of
    transformers' base classes, and resembles no listed one.
    """
    try:
        defaults = config_class().to_dict()
    except Exception:  # without defaults, there is no list of its keys
        return
    known = {*defaults, *inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    known |= {key for key in vars(PretrainedConfig()) if not key.startswith("_")}
    for key in data:
        if key in known or key in _NEVER_LISTED:
            continue
        close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.8)
        if close or not _is_read(str(key), config_class):
            close = close or difflib.get_close_matches(str(key), known, n=3, cutoff=0.5)
            said = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise UnknownNameError(f"model.config.{key}: {data['model_type']} has no such key.{said}")


def _is_read(key: str, config_class: type[PretrainedConfig]) -> bool:
    """Whether source code names ``key``, as a text or an attribute; of a model of other packages nobody knows."""
    if not config_class.__module__.startswith("transformers."):
        return True
    own = Path(inspect.getfile(config_class)).parent
    base = Path(inspect.getfile(PretrainedConfig)).parent
    files = [*own.glob("*.py"), *(base / f"{name}.py" for name in _READERS)]
    named = re.compile(rf"[.\"']{re.escape(key)}\b")
    return any(named.search(file.read_text(encoding="utf-8")) for file in files if file.is_file())


def _built_anew(stored: PretrainedConfig, data: Mapping[str, Any], where: str) -> PretrainedConfig:
    """A new config of the class of ``stored`` from ``data``, so that its constructor sees the overridden settings.

    ``from_pretrained(**overrides)`` would set them only afterwards: values that the constructor derives from them would
    be those of the original settings.
    """
    config = _made(type(stored), data, where)
    config.name_or_path = stored.name_or_path  # where transformers looks for code that is shipped with the model
    return config


def _no_config_in(folder: Path) -> JobFileError:
    if any(folder.glob("*.safetensors")):
        return JobFileError(
            f"{folder} holds weights and no config.json, so their model is unknown. Give the model's config "
            "(model.config, or config_path) too, or put its config.json into the folder"
        )
    return JobFileError(f"{folder}: there is no config.json in this folder; give the path of a model's config")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobFileError(f"{path}: there is no such model config") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither JSON nor UTF-8, or too long a number
        raise JobFileError(f"{path}: not a JSON model config: {error}") from None
    if not isinstance(data, dict):
        raise JobFileError(f"{path}: a model config is a mapping, this holds a {type(data).__name__}")
    return data


def _from_hub(name: str, overrides: dict[str, Any], trust_remote_code: bool) -> PretrainedConfig:
    if "/" in name and not is_hub_id(name):
        raise JobFileError(f"{name}: there is no such folder or model config.{nearest(Path(name))}")
    try:
        stored = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        data, _ = PretrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise HostError(
            f"{name}: neither a local path nor a model that can be fetched from the Hub: {reason}"
        ) from error
    return _built_anew(stored, {**data, **overrides}, name) if overrides else stored
