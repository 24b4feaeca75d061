"""Finds what a job names by an id of the Hugging Face Hub, such as ``Qwen/Qwen3-0.6B``, in the Hub's cache or there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from veomni_core.errors import HostError, JobFileError, suggest
from veomni_transformers.jobs.job_files import first_line

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_FILES = (
    *(".arrow", ".bz2", ".csv", ".feather", ".gz", ".json", ".jsonl", ".md", ".ndjson", ".parquet", ".py"),
    *(".safetensors", ".tsv", ".txt", ".yaml", ".yml", ".zst"),
)
_WITHOUT_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_KINDS = {"model": _WITHOUT_WEIGHTS, "dataset": ("README.md",)}
# Copies of the same weights for other programs.
_NOT_NEEDED = ("consolidated*", "*/*.safetensors", "original/*", "onnx/*")


def is_hub_id(name: Any) -> bool:
    """Whether ``name`` is ``owner/name`` or ``owner/name@revision``, with no file's suffix and nothing at that path."""
    match = _ID.fullmatch(name) if isinstance(name, str) else None
    return bool(match) and not match[1].lower().endswith(_FILES) and not os.path.lexists(name)  # type: ignore[index]


def is_offline() -> bool:
    """Whether the environment forbids to reach the Hub (``HF_HUB_OFFLINE``)."""
    return bool(constants.HF_HUB_OFFLINE)


def pinned(
    key: str,
    name: str,
    revision: str | None = None,
    *,
    kind: str = "model",
    known: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """``owner/name@commit``: as ``known`` has it for the same name and revision, or as the Hub has it now.

    Raises:
        HostError: it is neither in the cache nor can it be fetched.
        JobFileError: the Hub has no such id or revision.
    """
    identifier, wanted = _id_and_revision(name, revision)
    written = f"{identifier}@{wanted}" if wanted else identifier
    return known.get(written) or f"{identifier}@{snapshot(key, written, kind=kind).name}"


def snapshot(
    key: str, name: str, revision: str | None = None, *, kind: str = "model", with_weights: bool = False
) -> Path:
    """The folder of the Hub's cache that holds one commit of ``name``; its own name is the commit's hash.

    What is missing in it is downloaded, by one process of this machine at a time. Without a connection, or with
    ``HF_HUB_OFFLINE``, it is what the cache has.

    Args:
        key: the key of the job, for messages.
        name: the id; it may have a revision of its own, as ``owner/name@revision``.
        revision: a branch, a tag or a commit; by default ``main``.
        kind: ``model`` or ``dataset``; of a data set, the description alone.
        with_weights: of a model, whether its weights too.

    Raises:
        HostError: it is neither in the cache nor can it be fetched; the message says why.
        JobFileError: the Hub has no such id or revision, or does not let this user have it.
    """
    identifier, wanted = _id_and_revision(name, revision)
    patterns = [*_KINDS[kind], *(("*.safetensors",) if with_weights else ())]
    try:
        with one_at_a_time(identifier, kind):
            folder = snapshot_download(
                identifier, repo_type=kind, revision=wanted, allow_patterns=patterns, ignore_patterns=[*_NOT_NEEDED]
            )
    except GatedRepoError as error:
        raise JobFileError(f"{key}: {identifier} is gated: {first_line(error)} Log in with `hf auth login`") from None
    except RevisionNotFoundError:
        raise JobFileError(f"{key}: {identifier} has no revision {wanted!r} on the Hub") from None
    except RepositoryNotFoundError:
        raise JobFileError(
            f"{key}: {identifier} is no path here, and no {kind} of the Hub that you may read. Correct it, or log in "
            f"with `hf auth login`.{nearest(Path(identifier))}"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        at = f" at revision {wanted!r}" if wanted else ""
        why = "HF_HUB_OFFLINE is set" if is_offline() else first_line(error.__cause__ or error)
        raise HostError(
            f"{key}: {identifier} is no path here, the Hub's cache ({constants.HF_HUB_CACHE}) has no {kind} of that "
            f"id{at}, and the Hub can't be reached: {why}.{nearest(Path(identifier))}"
        ) from None
    if with_weights and is_offline() and not any(Path(folder).glob("*.safetensors")):
        raise HostError(
            f"{key}: the Hub's cache has no weights (*.safetensors) of {identifier} in {folder}, and HF_HUB_OFFLINE is "
            "set. Download them first"
        )
    return Path(folder)


def nearest(path: Path, *others: str) -> str:
    """`` Did you mean 'b.txt'?`` for what is beside ``path``, or among ``others``, and spelt alike; or nothing."""
    try:
        siblings = [each.name for each in path.parent.iterdir()]
    except OSError:
        siblings = []
    return f" {hint}" if (hint := suggest(path.name, [*siblings, *others], {})) else ""


def one_at_a_time(identifier: str, kind: str) -> AbstractContextManager[Any]:
    """Held by the one process of this machine that downloads; offline there is nothing to wait for."""
    if is_offline():
        return nullcontext()
    locks = Path(constants.HF_HUB_CACHE) / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"veomni-{kind}s--{identifier.replace('/', '--')}.lock")


def _id_and_revision(name: str, revision: str | None) -> tuple[str, str | None]:
    """The id, and the revision behind its ``@`` or else ``revision``."""
    identifier, _, own = name.partition("@")
    return identifier, own or revision
