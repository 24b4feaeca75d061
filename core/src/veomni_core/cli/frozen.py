"""``--frozen``, and a job's ``train.frozen``: which lock file holds. veomni-tools reads them, and the file.

A verb may be a plugin's own, and finding it imports plugins: so this is read before, from the command line as typed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Protocol

import typer

from veomni_core.descriptions.references import load_from
from veomni_core.discovery.lock_guard import FROZEN, lock_reader
from veomni_core.errors import ConfigError, LockFileError
from veomni_core.jobs.jobfile import load_yaml
from veomni_core.planning.plan import Plan

OPTION, LOCK_FILE = "--frozen", "veomni.lock"


def _was_read(wanted: bool) -> bool:
    """Refuse the option where nobody read it: a verb that is called without the application around it."""
    if wanted and not os.environ.get(FROZEN):
        raise ConfigError(f"{OPTION} is read by the command `veomni`; here, set {FROZEN} to the lock file")
    return wanted


class FrozenJob(Protocol):
    """A job whose plan must be that of a lock file, which ``str`` names."""

    def check(self, plan: Plan) -> None:
        """Raise LockMismatchError, which names the sites, if ``plan`` is not the one that was locked."""


Frozen = Annotated[
    bool,
    typer.Option(
        OPTION,
        help=f"Refuse whatever differs from {LOCK_FILE}, before a plugin is imported; or --frozen=LOCK for another.",
        callback=_was_read,
    ),
]


def frozen_as_said(arguments: Sequence[str]) -> AbstractContextManager[list[str]]:
    """Set ``VEOMNI_FROZEN`` as ``arguments``, a verb and what follows it, or their job say, while the verb runs.

    Returns:
        A context of the arguments, with ``--frozen`` in place of ``--frozen=LOCK``.

    Raises:
        LockFileError: a lock file is named, and veomni-tools is not installed.
    """
    try:
        said = load_from("veomni_tools.locks.said:frozen_as_said")
    except ImportError as error:
        if source := next(_naming_a_lock(arguments), None):
            raise LockFileError(f"{source} names a lock file, and {error}") from error
        return nullcontext([*arguments])
    return said(arguments)  # type: ignore[no-any-return]


def _naming_a_lock(arguments: Sequence[str]) -> Iterator[str]:
    """What names a lock file. A job that can't be read is the verb's to refuse."""
    if os.environ.get(FROZEN, "").strip():
        yield FROZEN
    for text in arguments:
        if text.partition("=")[0] == OPTION:
            yield OPTION
        elif Path(text).suffix in (".yaml", ".yml") and Path(text).is_file():
            with suppress(ConfigError):
                train = load_yaml(text).get("train")
                if isinstance(train, dict) and train.get("frozen"):
                    yield f"train.frozen of {text}"


def frozen_job(job: Path) -> FrozenJob | None:
    """The job in the file ``job``, if ``VEOMNI_FROZEN`` names a lock file; otherwise ``None``.

    Raises:
        LockFileError: there is no such lock file, or it is damaged.
    """
    read = lock_reader(os.environ, "locked_plans:frozen_job")
    return read(job) if read else None
