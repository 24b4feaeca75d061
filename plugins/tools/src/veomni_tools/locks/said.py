"""Which lock file the command line, as it was typed, or a job names; discovery reads ``VEOMNI_FROZEN``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from veomni_core.cli.frozen import LOCK_FILE, OPTION
from veomni_core.discovery.lock_guard import FROZEN
from veomni_core.errors import ConfigError, LockFileError, VeOmniError
from veomni_core.jobs.jobfile import at_home, load_yaml
from veomni_tools.locks.rank_refusals import refuse_on_all_ranks
from veomni_transformers.jobs.assignments import assigned, read_assignments
from veomni_transformers.jobs.job_files import beside_job, job_file_error, shown

_SET = "--set"
_WRITES = "lock"  # the verb that writes the file must run when something differs


@contextmanager
def frozen_as_said(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Set ``VEOMNI_FROZEN`` to the lock file that ``arguments`` or their job name, for as long as the verb runs.

    Where several ranks are launched, all of them end here if one is refused.

    Args:
        arguments: the verb, and what follows it.

    Yields:
        The arguments, with ``--frozen`` in place of ``--frozen=LOCK``.

    Raises:
        LockFileError: two different lock files are named, or the one can't be read.
        LockMismatchError: this rank, or another one, is refused.
    """
    verb, *rest = arguments
    before = os.environ.get(FROZEN)
    try:
        lock = None if verb == _WRITES else _named(rest)
    except VeOmniError as error:
        refuse_on_all_ranks(error)
        raise
    try:
        if lock is not None:
            os.environ[FROZEN] = str(lock)
            refuse_on_all_ranks()
        yield [verb, *(OPTION if each.startswith(f"{OPTION}=") else each for each in rest)]
    finally:
        if lock is not None:
            os.environ.pop(FROZEN)
            os.environ |= {} if before is None else {FROZEN: before}


def _named(rest: Sequence[str]) -> Path | None:
    """The lock file; ``None`` where nothing asks for one."""
    named: dict[str, Path] = {}
    for text in rest:
        if text.startswith(f"{OPTION}=") and text != f"{OPTION}=":
            named[OPTION] = Path(text.partition("=")[2])
    for job, lock in _of_jobs(rest):
        named[f"train.frozen of {job}"] = lock
    if os.environ.get(FROZEN, "").strip():
        named[FROZEN] = Path(os.environ[FROZEN].strip())
    if OPTION in rest and not named:
        named[OPTION] = Path(LOCK_FILE)
    files = {at_home(path).absolute().resolve() for path in named.values()}
    if len(files) > 1:
        said = ", ".join(f"{source}: {path}" for source, path in named.items())
        raise LockFileError(f"different lock files are named ({said}); leave one")
    return next(iter(files), None)


def _of_jobs(rest: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """The jobs among the arguments that say ``train.frozen``, with their lock files."""
    changes = [value for name, value in pairwise(rest) if name == _SET]
    changes += [each.partition("=")[2] for each in rest if each.startswith(f"{_SET}=")]
    for text in rest:
        job = Path(text)
        if job.suffix in (".yaml", ".yml") and job.is_file():
            try:
                train = assigned(load_yaml(job), read_assignments(changes)).get("train")
            except ConfigError:  # the verb reads the job too, and says what is wrong with it
                continue
            said = train.get("frozen") if isinstance(train, dict) else None
            if isinstance(said, str) and said:
                yield text, Path(beside_job(said, job.parent))
            elif said is not None:
                raise job_file_error(text, {"train.frozen": f"must be the path of a lock file, got {shown(said)}"})
