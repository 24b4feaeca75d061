"""Pins what a job names on the Hugging Face Hub to commits: its run's record has them, and goes on with the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from veomni_core.commands import load_yaml
from veomni_core.errors import JobFileError
from veomni_trainer.job.data_section import DataSection
from veomni_trainer.job.schema import Job
from veomni_trainer.job.source_keys import Files
from veomni_transformers.jobs.hub_snapshots import is_hub_id, pinned


def pinned_job(job: Job, recorded: Path | None = None) -> Job:
    """``job`` with Hub ids at a commit, as ``owner/name@commit``; the same job if it names nothing on the Hub.

    Args:
        job: the job.
        recorded: the job file of the run that goes on: its commits are taken for the same ids and revisions.

    Raises:
        ConfigError: a revision of what is not on the Hub.
        HostError: the Hub and its cache don't have what is named.
    """
    known = dict(_known(recorded))
    return job.model_copy(update={"model": job.model.pinned(known), "data": _pinned_data(job.data, known)})


def _pinned_data(data: DataSection, known: Mapping[str, str]) -> DataSection:
    def pin(key: str, files: Files | None, revision: str | None) -> Any:
        if isinstance(files, list):
            return [pin(key, each, revision) for each in files]
        return pinned(key, files, revision, kind="dataset", known=known) if files and is_hub_id(files) else files

    changes = {key: pin(f"data.{key}", getattr(data, key), data.revision) for key in ("files", "validation_files")}
    if data.tokenizer is not None and is_hub_id(data.tokenizer):
        changes["tokenizer"] = pinned("data.tokenizer", data.tokenizer, known=known)
    if data.sources is not None:
        changes["sources"] = [
            each.model_copy(
                update={"files": pin(f"data.sources.{n}.files", each.files, each.revision or data.revision)}
            )
            for n, each in enumerate(data.sources)
        ]
    return data.model_copy(update=changes)


def _known(recorded: Path | None) -> Iterator[tuple[str, str]]:
    """The recorded ids at a commit, by what is written for them; none of a file that resuming will refuse."""
    try:
        job = load_yaml(recorded) if recorded and recorded.is_file() else {}
    except JobFileError:
        return
    model, data = job.get("model") or {}, job.get("data") or {}
    named = [(model.get(key), model.get("revision")) for key in ("weights", "config")]
    named += [(data.get("tokenizer"), None)]
    named += [(data.get(key), data.get("revision")) for key in ("files", "validation_files")]
    named += [(each.get("files"), each.get("revision") or data.get("revision")) for each in data.get("sources") or ()]
    for names, revision in named:
        for name in names if isinstance(names, list) else [names]:
            identifier, at, _ = str(name).partition("@")
            if at:
                yield f"{identifier}@{revision}" if revision else identifier, str(name)
