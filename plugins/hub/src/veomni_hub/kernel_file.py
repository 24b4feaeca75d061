"""Reads the file that lists the Hub's kernels. One that is wrong is refused whole, with every problem."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from veomni_core import HardwareRequirement
from veomni_core.commands import at_home, load_yaml
from veomni_core.errors import ConfigError, SpecError, did_you_mean
from veomni_hub.hub_kernel import HubKernel, Package

VARIABLE = "VEOMNI_HUB_KERNELS"
_PACKAGE_KEYS = ("folder", "repo", "revision", "download", "variants", "kernels")
_HARDWARE_KEYS = ("device_type", "min_compute_capability", "max_compute_capability", "packages")
_PROMISES = ("dtypes", "backward", "deterministic", "features", "preference")
_KERNEL_KEYS = ("op", "variant", "layer", "function", "call", "hardware", *_PROMISES)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def listed() -> tuple[HubKernel, ...]:
    """The kernels of the file that ``VEOMNI_HUB_KERNELS`` names; none where it is not set.

    Raises:
        ConfigError: the file is wrong; the message holds every problem.
    """
    name = os.environ.get(VARIABLE, "").strip()
    return read(at_home(name)) if name else ()


def read(path: Path) -> tuple[HubKernel, ...]:
    """The kernels that the file ``path`` lists. Neither reads a folder that it names, nor downloads anything.

    Raises:
        ConfigError: the file is missing or wrong; the message holds every problem.
    """
    path = path.absolute()
    problems: list[str] = []
    kernels = [kernel for name, entry in load_yaml(path).items() for kernel in _kernels(path, name, entry, problems)]
    if problems:
        raise ConfigError(f"{path} ({VARIABLE}): {'; '.join(problems)}")
    return tuple(kernels)


def _kernels(path: Path, name: Any, entry: Any, problems: list[str]) -> list[HubKernel]:
    where = str(name)
    if not _is_mapping(where, entry, _PACKAGE_KEYS, problems):
        return []
    package = _package(path, where, entry, problems)
    parts = entry.get("kernels")
    if not isinstance(parts, list) or not parts:
        problems.append(
            f"{where}.kernels must be a list of kernels, each with op, variant, layer or function, and call"
        )
        return []
    made = (_kernel(package, f"{where}.kernels[{i}]", part, problems) for i, part in enumerate(parts))
    return [kernel for kernel in made if kernel is not None]


def _package(path: Path, where: str, entry: Mapping[str, Any], problems: list[str]) -> Package:
    folder, repo, revision = (_text(where, entry, key, problems) for key in ("folder", "repo", "revision"))
    variants, download = entry.get("variants"), entry.get("download", False)
    if bool(folder) == bool(repo):
        problems.append(f"{where} needs folder (which holds build/), or repo and revision: one of the two")
    if repo and not _COMMIT.fullmatch(revision):
        problems.append(f"{where}.revision must be a commit of 40 hexadecimal digits, since branches and tags can move")
    if not isinstance(download, bool):
        problems.append(f"{where}.download must be true or false")
    if folder and (revision or download):
        problems.append(f"{where}: revision and download are for a repo, and this is a folder")
    if not isinstance(variants, dict) or not variants:
        problems.append(f"{where}.variants must map build variants to digests; `veomni hub FOLDER` prints them")
        variants = {}
    for variant, digest in variants.items():
        if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            problems.append(f"{where}.variants.{variant} must read sha256: and 64 hexadecimal digits, not {digest!r}")
    at = path.parent / at_home(folder) if folder else None
    return Package(where, variants, at, repo, revision, download is True, path)


def _kernel(package: Package, where: str, part: Any, problems: list[str]) -> HubKernel | None:
    before = len(problems)
    if not _is_mapping(where, part, _KERNEL_KEYS, problems):
        return None
    op, variant, layer, function = (_text(where, part, key, problems) for key in ("op", "variant", "layer", "function"))
    if not op or not variant:
        problems.append(f"{where} needs op and variant; `veomni list` shows them")
    if bool(layer) == bool(function):
        problems.append(f"{where} needs layer (a class in the package's layers) or function: one of the two")
    call, hardware = part.get("call"), part.get("hardware", {})
    if not isinstance(call, dict) or not call or not all(map(_is_mapped, call.items())):
        problems.append(
            f"{where}.call must map each parameter to an argument of the op, or to {{value: ...}} for a constant"
        )
    elif function and any(name.startswith("self.") for name in call):
        problems.append(f"{where}.call: a function has no self; only a layer reads attributes")
    _is_mapping(f"{where}.hardware", hardware, _HARDWARE_KEYS, problems)
    if len(problems) > before:
        return None
    promises = {key: part[key] for key in _PROMISES if key in part}
    try:
        kernel = HubKernel(package, op, variant, layer, function, call, HardwareRequirement(**hardware), promises)
        _ = kernel.spec  # checks the fields
    except (SpecError, TypeError) as error:
        problems.append(f"{where}: {error}")
        return None
    return kernel


def _is_mapping(where: str, value: Any, keys: tuple[str, ...], problems: list[str]) -> bool:
    """Whether ``value`` is a mapping; each of its keys that is not in ``keys`` becomes a problem."""
    if not isinstance(value, dict):
        problems.append(f"{where} must be a mapping with some of {', '.join(keys)}")
        return False
    unknown = [str(key) for key in value if key not in keys]
    problems += [f"{where}.{key}: there is no such key. {did_you_mean(key, keys)}" for key in unknown]
    return True


def _text(where: str, entry: Mapping[str, Any], key: str, problems: list[str]) -> str:
    value = entry.get(key, "")
    if isinstance(value, str):
        return value
    problems.append(f"{where}.{key} must be text, not {value!r}")
    return ""


def _is_mapped(item: tuple[Any, Any]) -> bool:
    """Whether an item of ``call`` maps a name to an argument of the op or to a constant."""
    name, value = item
    return isinstance(name, str) and (isinstance(value, str) or (isinstance(value, dict) and {*value} == {"value"}))
