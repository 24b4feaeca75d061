"""Checks the descriptions of all plugins against each other and against the core.

A plugin whose ops, fields, devices, rules or commands conflict with another's fails as a whole. A kernel for an unknown
op or variant is skipped on its own, with the reason: its plugin may have been written for a newer core, or for a plugin
that is not installed. So is one whose device type is a known one misspelt; others may be of such a plugin.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from operator import attrgetter
from typing import Any

from veomni_core.descriptions.hardware import ANY_DEVICE, NAMED
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.discovery.registry import PluginRecord, SkippedKernel, ops_of
from veomni_core.errors import did_you_mean

# The core describes nothing itself. It has a record, so that lists and locks name it.
CORE = PluginRecord("veomni-core", "veomni-core", "built in", "veomni_core", defines=True)


def settle(records: Iterable[PluginRecord]) -> list[PluginRecord]:
    """Mark conflicting plugins as failed, resolve variant aliases, and skip kernels whose op or variant is unknown."""
    settled = list(records)
    while problems := _contradictions([record for record in settled if record.healthy]):
        settled = [
            replace(record, status="failed", problem=problems[id(record)]) if id(record) in problems else record
            for record in settled
        ]
    ops = ops_of(settled)
    return [_with_known_kernels(record, ops, settled) if record.healthy else record for record in settled]


def claimed_twice(records: Iterable[PluginRecord]) -> dict[tuple[str, str, str], tuple[str, ...]]:
    """Kernels that several plugins describe, with those plugins. Such a kernel can't be used; the other ones can."""
    claims = _claimants([record for record in records if record.healthy], "kernels", attrgetter("key"))
    return {key: tuple(sorted(map(str, claimants))) for key, claimants in claims if len(claimants) > 1}


_MUST_BE_UNIQUE = (
    ("op", "ops", "name"),
    ("config field", "ops", "config_field"),
    ("device type", "devices", "device_type"),
    ("site rule", "site_rules", "name"),
    ("model rule", "model_rules", "name"),
    ("model view", "model_views", "name"),
    ("model type", "models", "model_type"),
    ("command", "commands", "name"),
)


def _contradictions(healthy: list[PluginRecord]) -> dict[int, str]:
    """The plugins that conflict with others: the ``id`` of each one's record, and what is wrong."""
    problems: dict[int, str] = {}
    for what, field, attribute in _MUST_BE_UNIQUE:
        for name, claimants in _claimants(healthy, field, attrgetter(attribute)):
            if len(claimants) > 1:
                why = f"{what} {name!r} is defined by {_who(claimants)}"
                problems.update((id(record), why) for record in _losers(claimants))
    problems |= _variants_twice(healthy)
    if problems:
        return problems
    ops = ops_of(healthy)
    fields = {op.config_field for op in ops.values()}
    for record in healthy:
        for device in record.devices:
            if unknown := sorted(set(device.preset) - fields):
                problems[id(record)] = (
                    f"device type {device.device_type}: its preset fills {unknown[0]!r}, which is not a config field. "
                    f"{did_you_mean(unknown[0], fields)}"
                )
        counts = Counter(_canonical(spec, ops).key for spec in record.kernels)
        for key in (key for key, count in counts.items() if count > 1):
            problems[id(record)] = f"kernel {'{}/{}:{}'.format(*key)} is described twice by one plugin"
    return problems


def _losers(claimants: list[PluginRecord]) -> list[PluginRecord]:
    """Of plugins that claim one name: all, but for the one among them that defines ops for everybody."""
    others = [record for record in claimants if not record.defines]
    return others if len(others) == len(claimants) - 1 else claimants


def _variants_twice(healthy: list[PluginRecord]) -> dict[int, str]:
    """The plugins that add a variant which another one, or the op itself, has already."""
    problems: dict[int, str] = {}
    described = [(record, op) for record in healthy for op in record.ops]
    own = {f"{op.name}/{name}": record for record, op in described for name in (*op.variants, *op.variant_aliases)}
    for name, claimants in _claimants(healthy, "variants", str):
        if name in own:
            problems.update((id(record), f"{own[name]} has the variant {name} already") for record in claimants)
        elif len(claimants) > 1:
            problems.update((id(record), f"the variant {name} is defined by {_who(claimants)}") for record in claimants)
    return problems


def _claimants(
    healthy: list[PluginRecord], field: str, key: Callable[[Any], Any]
) -> Iterable[tuple[Any, list[PluginRecord]]]:
    """The plugins that describe each thing of a ``field``, by its ``key``."""
    found: dict[Any, list[PluginRecord]] = defaultdict(list)
    for record in healthy:
        for described in getattr(record, field):
            found[key(described)].append(record)
    return found.items()


def _who(claimants: Iterable[PluginRecord]) -> str:
    return " and ".join(sorted({str(record) for record in claimants}))


def _with_known_kernels(
    record: PluginRecord, ops: Mapping[str, OpSpec], records: Iterable[PluginRecord]
) -> PluginRecord:
    kernels, skipped = [], []
    for spec in record.kernels:
        if reason := _unknown(spec, ops, records):
            skipped.append(SkippedKernel(spec, reason))
        else:
            kernels.append(_canonical(spec, ops))
    return replace(record, kernels=tuple(kernels), skipped=tuple(skipped))


def _unknown(spec: KernelSpec, ops: Mapping[str, OpSpec], records: Iterable[PluginRecord]) -> str:
    """Why ``spec`` can't be used: its op, variant or device type is unknown. Empty if none is."""
    op = ops.get(spec.op_name)
    if op is None:
        for record in records:
            if any(absent.name == spec.op_name for absent in record.ops):
                return f"op {spec.op_name!r} is defined by {record}, which {record.absence}"
        return f"op {spec.op_name!r} is unknown. {did_you_mean(spec.op_name, ops)}"
    if op.canonical_variant(spec.variant) not in op.variants:
        nearest = did_you_mean(spec.variant, [*op.variants, *op.variant_aliases])
        return f"{op.name} has no variant {spec.variant!r}. {nearest}"
    return _misspelt_device(spec, records)


def _misspelt_device(spec: KernelSpec, records: Iterable[PluginRecord]) -> str:
    described = (device.device_type for record in records for device in record.devices)
    known = {ANY_DEVICE, *(hardware.device_type for hardware in NAMED.values()), *described}
    for kind in sorted({each.device_type for each in (spec.hardware, *spec.hardware.others)} - known):
        # As near as cudaa is to cuda. Types of three letters that differ in one, as xpu and cpu, are two.
        if near := get_close_matches(kind.lower(), known, n=1, cutoff=0.8):
            return f"device type {kind!r} is unknown. Did you mean {near[0]!r}?"
    return ""


def _canonical(spec: KernelSpec, ops: Mapping[str, OpSpec]) -> KernelSpec:
    """``spec`` with a variant alias resolved, so that no key holds an alias from here on."""
    op = ops.get(spec.op_name)
    if op is None or op.canonical_variant(spec.variant) == spec.variant:
        return spec
    return replace(spec, variant=op.canonical_variant(spec.variant))
