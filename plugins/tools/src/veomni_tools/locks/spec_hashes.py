"""A hash of each thing that a plugin describes, which changes with any of its fields or with code elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from veomni_conformance.installed_files import hashes_elsewhere
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.op_spec import VariantSpec
from veomni_core.discovery.registry import PluginRecord

_DESCRIBED = {
    "ops": "op",
    "variants": "variant",
    "kernels": "kernel",
    "devices": "device",
    "site_rules": "site rule",
    "model_rules": "model rule",
    "model_views": "model view",
    "models": "model",
    "commands": "command",
}
_NAMES = ("name", "device_type", "model_type")  # the field by which a spec of each kind is known


def spec_hashes(record: PluginRecord) -> dict[str, str]:
    """The SHA-256 of each of the plugin's specs, by its kind and name: ``kernel rms_norm/standard:torch``.

    Two specs of one name have one hash together. A package that a factory names and that isn't the plugin's own has one
    too (``code acme_kernels``): its distribution need not be locked.

    Args:
        record: a plugin that loaded, as it describes itself.
    """
    specs: dict[str, list[str]] = {}
    for field, kind in _DESCRIBED.items():
        for spec in getattr(record, field):
            specs.setdefault(f"{kind} {_name(spec)}", []).append(json.dumps(_plain(spec), sort_keys=True))
    hashes = {name: hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest() for name, texts in specs.items()}
    return hashes | {f"code {package}": each for package, each in hashes_elsewhere(record).items()}


def _name(spec: Any) -> str:
    """What ``str`` gives for a kernel or a variant, else the name."""
    if isinstance(spec, (KernelSpec, VariantSpec)):
        return str(spec)
    return str(next(getattr(spec, field) for field in _NAMES if hasattr(spec, field)))


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it, the same in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return sorted(([_plain(key), _plain(each)] for key, each in value.items()), key=json.dumps)
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
