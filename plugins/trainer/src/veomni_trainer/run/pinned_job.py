"""Pins what a job names on the Hugging Face Hub to commits: its run's record has them, and goes on with the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from veomni_core.commands import load_yaml
from veomni_core.errors import JobFileError
from veomni_trainer.job.schema import Job
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

    def pin(key: str, name: str, revision: str | None) -> str:
        if not is_hub_id(name):
            return name
        return pinned(key, name, revision, kind="model" if key == "data.tokenizer" else "dataset", known=known)

    return job.model_copy(update={"model": job.model.pinned(known), "data": job.data.renamed(pin)})


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
