"""Reads a job's ``model`` section, for every command that runs jobs: what one of them refuses, all refuse alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from veomni_core.errors import did_you_mean
from veomni_core.jobfile import beside_job, job_file_error, shown

DTYPES = ("float32", "bfloat16", "float16")
ALIASES: Mapping[str, str] = {"config_path": "config", "path": "weights"}


@dataclass(frozen=True)
class ModelSection:
    """Which model, from which weights, with which kernels.

    ``config`` is a mapping with ``model_type`` and sizes, a path, or a Hub id; without it, ``weights`` brings its own.
    ``ops_implementation`` is checked by :class:`veomni_core.config.OpsConfig`, against the plugins that are installed.
    """

    config: str | dict[str, Any] | None = None
    weights: str | None = None
    dtype: str = "bfloat16"
    ops_implementation: dict[str, Any] | None = None
    trust_remote_code: bool = False

    @property
    def source(self) -> str | dict[str, Any]:
        """Where the model's config is taken from."""
        source = self.config if self.config is not None else self.weights
        assert source is not None
        return source

    def beside(self, folder: Path) -> ModelSection:
        """The section with relative paths looked up in ``folder`` first, then in the working directory."""
        return replace(
            self,
            config=beside_job(self.config, folder) if isinstance(self.config, str) else self.config,
            weights=beside_job(self.weights, folder) if self.weights else None,
        )


class ModelSectionError(ValueError):
    """A ``model`` section that can't be read; ``problems`` maps the dotted path of each faulty key to what is wrong."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{path}: {problem}" for path, problem in problems.items()))
        self.problems = dict(problems)


def read_model_section(value: Any) -> ModelSection:
    """The section that ``value``, read from YAML, holds.

    Raises:
        ModelSectionError: with every problem that there is.
    """
    if not isinstance(value, Mapping):
        raise ModelSectionError({"model": f"must be a mapping, got {shown(value)}"})
    problems: dict[str, str] = {}
    section: dict[str, Any] = {}
    for key, item in value.items():
        name = ALIASES.get(key, key)
        if name not in _WANTED:
            problems[f"model.{key}"] = _unknown(str(key))
        elif name in section:
            problems[f"model.{key}"] = f"is another word for model.{name}, which is given too; give one of the two"
        else:
            section[name] = item
            wanted, accepts = _WANTED[name]
            if not accepts(item):
                problems[f"model.{key}"] = f"must be {wanted}, got {shown(item)}"
    if section.get("config") is None and section.get("weights") is None:
        problems["model"] = "needs config (a mapping with model_type, a path, or a Hub id), or weights (a folder)"
    if problems:
        raise ModelSectionError(problems)
    return ModelSection(**section)


def model_section_of(job: Mapping[str, Any], source: str, folder: Path) -> ModelSection:
    """The ``model`` section of a whole job that was read from ``source`` in ``folder``, its paths looked up there.

    Raises:
        JobFileError: there is none, or it can't be read; the message lists every problem.
    """
    if "model" not in job:
        raise job_file_error(source, {"model": "is missing"})
    try:
        return read_model_section(job["model"]).beside(folder)
    except ModelSectionError as error:
        raise job_file_error(source, error.problems) from None


_WANTED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "config": ("text or a mapping", lambda value: value is None or isinstance(value, (str, dict))),
    "weights": ("text", lambda value: value is None or isinstance(value, str)),
    "dtype": (f"{', '.join(map(repr, DTYPES[:-1]))} or {DTYPES[-1]!r}", lambda value: value in DTYPES),
    "ops_implementation": ("a mapping", lambda value: value is None or isinstance(value, dict)),
    "trust_remote_code": ("true or false", lambda value: isinstance(value, bool)),
}


def _unknown(key: str) -> str:
    if key.endswith("_implementation"):
        return "there is no such key. A kernel is chosen under model.ops_implementation."
    return f"there is no such key. {did_you_mean(key, [*_WANTED, *ALIASES])}"
