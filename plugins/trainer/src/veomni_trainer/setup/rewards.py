"""The functions that judge completions, and what they return, checked."""

from __future__ import annotations

import importlib
import importlib.util
import math
import traceback
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from veomni_core.errors import JobFileError, TrainingDivergedError

Reward = Callable[..., list[float | None]]


def load_reward(reference: str, key: str = "train.grpo.reward") -> Reward:
    """The function that ``module:function`` or ``path/to/file.py:function`` names, with its results checked.

    ``key`` is the job's key that names it, for messages.

    It is called with ``prompts``, ``completions`` and the data's other columns as keywords, a list each, and returns a
    number for each completion, or ``None`` for one that it doesn't judge.

    Raises:
        JobFileError: there is no such function.
    """
    where, colon, name = reference.rpartition(":")
    if not (colon and where and name):
        raise JobFileError(f"{key}: {reference!r} names no function; write module:function or file.py:function")
    module = _module_of(where, reference, key)
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        there = f"its functions are {', '.join(functions)}" if functions else "it has no functions"
        raise JobFileError(f"{key}: {where} has no function {name!r}; {there}")
    return _checked(function, reference, name, key)


def _module_of(where: str, reference: str, key: str) -> Any:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        if not Path(where).is_file():
            raise JobFileError(f"{key}: there is no file {where}")
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except JobFileError:
        raise
    except (Exception, SystemExit) as error:  # of the user's module
        raise JobFileError(f"{key}: {reference} can't be imported: {type(error).__name__}: {error}") from error


def _checked(function: Callable[..., Any], reference: str, name: str, key: str) -> Reward:
    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        try:
            values = function(prompts=prompts, completions=completions, **columns)
        except (Exception, SystemExit) as error:  # of the user's function
            at = traceback.extract_tb(error.__traceback__)[-1]
            if isinstance(error, TypeError) and at.filename == __file__:
                raise JobFileError(
                    f"{key}: {reference} can't be called with keywords ({error}): it is given prompts, completions and "
                    f"{', '.join(columns)}; write def {name}(completions, **columns)"
                ) from error
            raise JobFileError(
                f"{key}: {reference} raised {type(error).__name__}: {error} (line {at.lineno} of {at.filename}), for "
                f"{len(completions)} completions, the first of them {completions[0]!r}"
            ) from error
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            found = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"a {type(values).__name__}"
            raise JobFileError(
                f"{key}: {reference} returned {found} for {len(completions)} completions; return a list with a number "
                "for each"
            )
        for number, value in enumerate(values):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise JobFileError(f"{key}: {reference} returned {value!r} for a completion; return a number or None")
            if not math.isfinite(value):
                raise TrainingDivergedError(
                    f"{key}: {reference} returned {value} for the completion {completions[number]!r}; a reward that "
                    "is not finite would make every weight so"
                )
        return list(values)

    reward.__name__ = name  # by which TRL names its metrics
    return reward
