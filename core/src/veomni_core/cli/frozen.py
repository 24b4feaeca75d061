"""``--frozen``, and a job's ``train.frozen``: which lock file holds, told to discovery by ``VEOMNI_FROZEN``.

A verb may be a plugin's own, and finding it imports plugins. So this is read before, from the command line as it was
typed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from veomni_core.cli.rank_refusals import refuse_on_all_ranks
from veomni_core.discovery.lock_file import NAME
from veomni_core.discovery.locked import FROZEN
from veomni_core.errors import ConfigError, LockFileError, VeOmniError
from veomni_core.jobs.assignments import assigned, read_assignments
from veomni_core.jobs.jobfile import at_home, beside_job, job_file_error, load_yaml, shown

_OPTION, _SET = "--frozen", "--set"
_WRITES = "lock"  # the verb that writes the file must run when something differs


def _was_read(wanted: bool) -> bool:
    """Refuse the option where nobody read it: a verb that is called without the application around it."""
    if wanted and not os.environ.get(FROZEN):
        raise ConfigError(f"{_OPTION} is read by the command `veomni`; here, set {FROZEN} to the lock file")
    return wanted


Frozen = Annotated[
    bool,
    typer.Option(
        _OPTION,
        help=f"Refuse whatever differs from {NAME}, before a plugin is imported; or --frozen=LOCK for another file.",
        callback=_was_read,
    ),
]


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
        yield [verb, *(_OPTION if each.startswith(f"{_OPTION}=") else each for each in rest)]
    finally:
        if lock is not None:
            os.environ.pop(FROZEN)
            os.environ |= {} if before is None else {FROZEN: before}


def _named(rest: Sequence[str]) -> Path | None:
    """The lock file; ``None`` where nothing asks for one."""
    named: dict[str, Path] = {}
    for text in rest:
        if text.startswith(f"{_OPTION}=") and text != f"{_OPTION}=":
            named[_OPTION] = Path(text.partition("=")[2])
    for job, lock in _of_jobs(rest):
        named[f"train.frozen of {job}"] = lock
    if os.environ.get(FROZEN, "").strip():
        named[FROZEN] = Path(os.environ[FROZEN].strip())
    if _OPTION in rest and not named:
        named[_OPTION] = Path(NAME)
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
