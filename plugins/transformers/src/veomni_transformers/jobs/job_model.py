"""Reads a job's ``model`` section. All commands use this reader, so they all accept and refuse the same jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from veomni_core.errors import CheckpointError, ConfigError, did_you_mean, suggest
from veomni_transformers.jobs.job_files import beside_job, job_file_error, shown

DTYPES = ("float32", "bfloat16", "float16")
ALIASES: Mapping[str, str] = {"config_path": "config", "path": "weights"}
# Names that the keys have elsewhere.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "base_model": ("config", "weights"),
    "model_name_or_path": ("config", "weights"),
    "model_path": ("weights", "config"),
    "checkpoint": ("weights",),
    "model_revision": ("revision",),
    "torch_dtype": ("dtype",),
    "precision": ("dtype",),
}


@dataclass(frozen=True)
class ModelSection:
    """Which model, from which weights, with which kernels."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "use_attribute_docstrings": True
    }  # for who makes a schema of it

    config: str | dict[str, Any] | None = None
    """A mapping with ``model_type`` and sizes, a path, or a Hub id; without it, the weights' own config."""
    weights: str | None = None
    """A folder of safetensors files, or a Hub id. Without it, the weights are random."""
    revision: str | None = None
    """The branch, tag or commit of a Hub id; by default ``main``."""
    dtype: str | None = None
    """The dtype of the weights. Without it, what the job's training says; in a job of a model alone, bfloat16."""
    ops_implementation: dict[str, Any] | None = None
    """Which kernels run."""
    modeling: str | None = None
    """A file that ``veomni patchgen`` has written; its classes are built instead of transformers'."""
    resize_embeddings: bool = False
    """Whether the weights get embeddings for tokens that their tokenizer did not have."""
    trust_remote_code: bool = False
    """Whether code that is shipped with the model may run."""

    @property
    def source(self) -> str | dict[str, Any]:
        """Where the model's config comes from: ``config``, or else ``weights``."""
        source = self.config if self.config is not None else self.weights
        assert source is not None
        return source

    def pinned(self, known: Mapping[str, str] = MappingProxyType({})) -> ModelSection:
        """The section with Hub ids at a commit, as ``owner/name@commit``; the same if it names nothing there.

        Args:
            known: ids at a commit, by ``id`` or ``id@revision``, that are taken in place of what the Hub has now.

        Raises:
            ConfigError: there is a revision, and nothing on the Hub that it is of.
            HostError: the Hub and its cache don't have what is named.
        """
        from veomni_transformers.jobs.hub_snapshots import is_hub_id, pinned

        names = {"config": self.config, "weights": self.weights}
        changes: dict[str, Any] = {
            key: pinned(f"model.{key}", str(name), self.revision, known=known)
            for key, name in names.items()
            if is_hub_id(name)
        }
        if self.revision is not None and not changes:
            raise ConfigError(
                "model.revision is that of a Hub id, and neither model.weights nor model.config is one; remove it"
            )
        return replace(self, **changes)

    def located(self, with_weights: bool = False) -> ModelSection:
        """The section with folders of the Hub's cache in place of Hub ids. What is missing there is downloaded.

        Args:
            with_weights: whether the files of the weights too.

        Raises:
            CheckpointError: the model's config is that of weights that are not here.
        """
        from veomni_transformers.jobs.hub_snapshots import is_hub_id, nearest, snapshot

        changes: dict[str, Any] = {}
        if is_hub_id(self.config):
            changes["config"] = str(snapshot("model.config", str(self.config), self.revision))
        if is_hub_id(self.weights):
            folder = snapshot("model.weights", str(self.weights), self.revision, with_weights=with_weights)
            changes["weights"] = str(folder)
        elif self.config is None and not Path(self.weights or "").exists():
            # transformers would ask the Hub for a config of any name, and no weights come by one without an owner.
            raise CheckpointError(
                f"model.weights: {self.weights} is not here, and is no Hub id, which has an owner (owner/name): "
                f"expected a folder with *.safetensors files.{nearest(Path(self.weights or ''))}"
            )
        return replace(self, **changes)

    def beside(self, folder: Path) -> ModelSection:
        """The section with relative paths looked up in ``folder`` first, then in the working directory."""
        return replace(
            self,
            config=beside_job(self.config, folder) if isinstance(self.config, str) else self.config,
            weights=beside_job(self.weights, folder) if self.weights else None,
            modeling=beside_job(self.modeling, folder) if self.modeling else None,
        )


class ModelSectionError(ValueError):
    """The ``model`` section is invalid; ``problems`` maps the dotted path of each invalid key to what is wrong."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{path}: {problem}" for path, problem in problems.items()))
        self.problems = dict(problems)


def read_model_section(value: Any) -> ModelSection:
    """Check ``value``, the ``model`` section as it was read from YAML.

    Raises:
        ModelSectionError: the section is invalid; the error holds every problem.
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
            problems[f"model.{key}"] = f"is another word for model.{name}, which is given too; remove one of the two"
        else:
            section[name] = item
            wanted, accepts = _WANTED[name]
            if not accepts(item):
                problems[f"model.{key}"] = f"must be {wanted}, got {shown(item)}{_hint(name, item)}"
    if section.get("config") is None and section.get("weights") is None:
        problems["model"] = (
            "needs config (a mapping with model_type, a path, or a Hub id), or weights (a folder or a Hub id)"
        )
    if problems:
        raise ModelSectionError(problems)
    return ModelSection(**section)


def model_section_of(job: Mapping[str, Any], source: str, folder: Path) -> ModelSection:
    """The ``model`` section of a whole job.

    Args:
        job: the job, as it was read from YAML.
        source: the job's file name, for messages.
        folder: where relative paths are looked up first.

    Raises:
        JobFileError: the section is missing or invalid; the message lists every problem.
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
    "revision": ("text", lambda value: value is None or isinstance(value, str)),
    "dtype": (f"{', '.join(map(repr, DTYPES[:-1]))} or {DTYPES[-1]!r}", lambda value: value is None or value in DTYPES),
    "ops_implementation": ("a mapping", lambda value: value is None or isinstance(value, dict)),
    "modeling": ("text", lambda value: value is None or isinstance(value, str)),
    "resize_embeddings": ("true or false", lambda value: isinstance(value, bool)),
    "trust_remote_code": ("true or false", lambda value: isinstance(value, bool)),
}


def _hint(name: str, item: Any) -> str:
    hint = suggest(item, DTYPES) if name == "dtype" and isinstance(item, str) else ""
    return hint and f". {hint}"


def _unknown(key: str) -> str:
    if key.endswith("_implementation"):
        return "there is no such key. A kernel is chosen under model.ops_implementation."
    return f"there is no such key. {did_you_mean(key, [*_WANTED, *ALIASES], SYNONYMS)}"
