"""The kinds of plugin that can be written: which templates each consists of, and the names that it adds."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from veomni_core.errors import ConfigError

OPS = ("rms_norm",)
_NAME = re.compile(r"[a-z]([a-z0-9_]*[a-z0-9])?")


@dataclass(frozen=True)
class Kind:
    """A kind of plugin.

    Attributes:
        folders: the folders of its templates. A file of a later one replaces that of an earlier one.
        names: what stands for the words ``$op`` and ``$device`` in them.
    """

    folders: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)


def kernel_of(op: str) -> Kind:
    """A kernel in plain PyTorch for an op of the core.

    Raises:
        ConfigError: there is no template for ``op``.
    """
    if op not in OPS:
        raise ConfigError(f"there is no template of a kernel for {op!r}; there is one for: {', '.join(OPS)}")
    return Kind(("common", f"torch_{op}", op), {"op": op})


def triton_kernel() -> Kind:
    """An RMSNorm kernel in Triton."""
    return Kind(("common", "triton"), {"op": "rms_norm"})


def new_op(name: str, taken: Collection[str]) -> Kind:
    """An op that the core doesn't know, with its contract, its site rule and a kernel.

    Args:
        name: lower-case letters, digits and single underscores, beginning with a letter.
        taken: the names of the ops that are here, and of their config fields.

    Raises:
        ConfigError: ``name`` has another form, or is taken.
    """
    _check("an op", name, taken)
    return Kind(("common", "new_op"), {"op": name})


def device_type(name: str, taken: Collection[str]) -> Kind:
    """A device type that the core doesn't know, with its detection, a preset and an RMSNorm kernel.

    Args:
        name: the type as torch calls it: lower-case letters, digits and single underscores, beginning with a letter.
        taken: the device types and presets that are here.

    Raises:
        ConfigError: ``name`` has another form, or is taken.
    """
    _check("a device", name, taken)
    return Kind(("common", "torch_rms_norm", "device"), {"op": "rms_norm", "device": name})


def _check(what: str, name: str, taken: Collection[str]) -> None:
    if not _NAME.fullmatch(name) or "__" in name or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} can't name {what}: write lower-case letters, digits and single underscores, a letter first, and "
            "no word of Python's"
        )
    if name in taken:
        raise ConfigError(f"{name!r} can't name {what} of a new plugin: there is one of that name; choose another name")
