"""Modeling files that ``veomni patchgen`` has generated: loaded if they fit the transformers that is installed."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from veomni_core.errors import ConfigError, HostError

RECORD = "VEOMNI_PATCHGEN"
"""The variable of a generated file that says from what it was generated."""


def record_of(path: Path) -> Mapping[str, Any]:
    """What the generated file ``path`` says of itself. It is read, not run.

    Raises:
        ConfigError: there is no such file, or ``veomni patchgen`` has not written it.
    """
    if not path.is_file():
        raise ConfigError(f"model.modeling: {path}: there is no such file. veomni patchgen PATCH -o DIR writes it")
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"model.modeling: {path} is no Python: {error}. veomni patchgen writes it anew") from None
    for each in body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id == RECORD:
            return ast.literal_eval(each.value)  # type: ignore[no-any-return]
    raise ConfigError(f"model.modeling: {path} was not written by veomni patchgen: it has no {RECORD}")


def load_generated(path: str | Path) -> ModuleType:
    """The module in a generated file; the same one for the same content.

    Raises:
        ConfigError: it is no generated file.
        HostError: it was generated from another version of the modeling file than the one that is installed.
    """
    file = Path(path).resolve()
    record = record_of(file)
    _refuse_other_source(file, record)
    # A name within transformers': others are custom code to it, whose weights it does not convert.
    name = f"{record['source_module']}_generated_{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    loaded = sys.modules.get(name)
    if loaded is None or not Path(loaded.__file__ or "").is_file():  # transformers reads the file of a class
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where slots and annotations look for it
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def generated_class(path: str | Path, config: Any) -> Any:
    """The class in the generated file ``path`` for a model of ``config``: its architecture, or its language model.

    Raises:
        ConfigError: the file has no such class.
        HostError: as :func:`load_generated`.
    """
    from transformers.models.auto import modeling_auto as auto  # here, since what writes such files needs none of it

    module = load_generated(path)
    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    mapped = (names.get(config.model_type) for names in mappings)
    wanted = [*(config.architectures or ()), *filter(None, mapped)]
    for name in wanted:
        if hasattr(module, name):
            return getattr(module, name)
    raise ConfigError(f"model.modeling: {path} has no {' or '.join(wanted) or 'class'} for a {config.model_type}")


class OwnClasses:
    """An ``AutoModel`` that builds the classes of a generated file where transformers' would build its own.

    Args:
        auto: the class of transformers, such as ``AutoModel``.
        namespace: the globals of the generated file.
    """

    def __init__(self, auto: Any, namespace: Mapping[str, Any]) -> None:
        self._auto, self._namespace = auto, namespace

    def from_config(self, config: Any, **options: Any) -> Any:
        """The model of ``config`` with random weights: of the generated file's class, if it has that class."""
        upstream = self._auto._model_mapping.get(type(config), None)
        own = self._namespace.get(getattr(upstream, "__name__", ""))
        return own._from_config(config, **options) if own else self._auto.from_config(config, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._auto, name)


def _refuse_other_source(file: Path, record: Mapping[str, Any]) -> None:
    top = record["source_module"].partition(".")[0]
    version = importlib.metadata.version(top)
    again = "Generate it again (veomni patchgen PATCH -o DIR), and look at its difference; --check says what moved"
    if version != record["version"]:
        raise HostError(
            f"model.modeling: {file} was generated for {top} {record['version']}; {version} is here. {again}"
        )
    spec = importlib.util.find_spec(record["source_module"])
    text = Path(spec.origin).read_bytes() if spec and spec.origin else b""
    if hashlib.sha256(text).hexdigest() != record["sha256"]:
        raise HostError(
            f"model.modeling: {file}: the {record['source_module']} here is not the one it was made from. {again}"
        )
