"""Says in the words of a job what transformers raises about a model's config."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from veomni_core.errors import ConfigError, VeOmniError

_LIBRARIES = {"transformers", "torch", "huggingface_hub", "veomni_transformers", *sys.stdlib_module_names}
# To be fixed on the machine: a package or a file that is missing, or too little memory.
_NOT_THE_CONFIGS = (VeOmniError, ImportError, OSError, MemoryError)
# Words of errors that name no key.
_KEYS_BEHIND = {"Padding_idx": ("pad_token_id", "vocab_size")}


@contextmanager
def explained(what: str, written: Mapping[str, Any], where: str) -> Iterator[None]:
    """Within it, what transformers raises because of a config is raised as a ConfigError.

    Args:
        what: what is done within, e.g. ``LlamaConfig can't be made``.
        written: what the config's author wrote.
        where: where that stands, for messages.

    Raises:
        ConfigError: the message has the library's own reason, and the keys that it speaks of with their values. If code
            of the model's own failed, the message names its file and line. The cause is the library's error.
    """
    try:
        yield
    except _NOT_THE_CONFIGS:
        raise
    except Exception as error:
        reason = _reason(error)
        keys = _keys_behind(error, reason, written)
        shown = (
            f"{where}: {', '.join(f'{path}: {value!r}' for path, value in keys.items())}: " if keys else f"{where}: "
        )
        raise ConfigError(f"{shown}{what}: {reason}. {_remedy(error, keys)}") from error


def _reason(error: Exception) -> str:
    """The error's text in one line. transformers puts the validator's name before the reason proper."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "alidation error for" in lines[0]:
        return " ".join(lines[1:]).rstrip(".")
    return f"{type(error).__name__}: {' '.join(lines)}".rstrip(".")


def _keys_behind(error: Exception, reason: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """The written keys that the reason names, or whose value it quotes, by their dotted path."""
    everything = dict(_flat(written))
    by_word = {name for word, names in _KEYS_BEHIND.items() if word in reason for name in names}
    text = f"{error} {reason}"
    found = {
        path: value
        for path, value in everything.items()
        if (name := path.rpartition(".")[2]) in by_word
        or any(spelling in text for spelling in (name, name.replace("num_", "number_of_").replace("_", " ")))
        or (isinstance(value, str) and f"'{value}'" in text)
    }
    return {path: value for path, value in found.items() if not any(other.startswith(f"{path}.") for other in found)}


def _flat(written: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in written.items():
        if isinstance(value, Mapping):
            yield f"{prefix}{key}", value
            yield from _flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "model_type":
            yield f"{prefix}{key}", value


def _remedy(error: Exception, keys: Mapping[str, Any]) -> str:
    if own := _own_code(error.__traceback__):
        return f"It was raised by {own}, which is not part of transformers: correct that code, or the config"
    return f"Correct {'one of these keys' if len(keys) > 1 else 'it'}, or leave it out for transformers' default"


def _own_code(traceback: TracebackType | None) -> str:
    """``FILE, line N`` of the innermost frame that belongs to the model's own code; empty if there is none."""
    found = ""
    while traceback is not None:
        code, name = traceback.tb_frame.f_code, str(traceback.tb_frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _LIBRARIES and code.co_filename.endswith(".py"):
            found = f"{code.co_filename}, line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found
