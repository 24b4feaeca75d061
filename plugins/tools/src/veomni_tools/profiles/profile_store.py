"""Where profiles are: one file for a model, the shape of its steps and a device, in the user's cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from veomni_conformance.ledger import cache_folder
from veomni_core.errors import HostError
from veomni_tools.profiles.measured_job import MeasuredJob
from veomni_tools.profiles.profile import Profile

_FOLDER, _DIGITS = "profiles", 12


def profile_file(job: MeasuredJob, hardware: str) -> Path:
    """The file of the profile of ``job`` on ``hardware``, whether it is there or not.

    What makes a profile stale is not in its name: so a stale one is found and named, and measuring again replaces it.
    """
    steps = hashlib.sha256(f"{job.batch}|{job.autocast}|{hardware}".encode()).hexdigest()
    return cache_folder() / _FOLDER / f"{job.model_type}-{job.model[:_DIGITS]}-{steps[:_DIGITS]}.json"


def read_profile(path: Path) -> Profile | None:
    """The profile in the file; ``None`` if there is none.

    Raises:
        HostError: it can't be read. A plan that went on without it would run other kernels than were measured.
    """
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise HostError(
            f"{path} is no profile of veomni tune, or is damaged ({type(error).__name__}: {error}). Remove the file to "
            "plan by declared ranks, or measure again with veomni tune"
        ) from error


def other_profiles(job: MeasuredJob, hardware: str) -> Iterator[Profile]:
    """The profiles of the same model with steps of another shape, or on another device."""
    own = profile_file(job, hardware)
    for path in sorted(own.parent.glob(f"{job.model_type}-{job.model[:_DIGITS]}-*.json")):
        if path != own and (profile := read_profile(path)) is not None:
            yield profile


def write_profile(profile: Profile) -> Path:
    """Write the profile so that it appears whole, and return its file.

    Raises:
        HostError: it can't be written.
    """
    path = profile_file(profile.job, profile.machine.hardware)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            written.write_text(profile.to_json(), encoding="utf-8")
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        raise HostError(
            f"{path} can't be written: {error}. Set VEOMNI_CACHE to a folder that can be written"
        ) from error
    return path
