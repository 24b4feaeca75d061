"""``veomni list``: what is installed."""

from __future__ import annotations

from typing import Any

from veomni_core.cli.frozen import Frozen
from veomni_core.cli.output import AsJson, print_json
from veomni_core.descriptions.hardware import Hardware
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import PluginRecord, Registry
from veomni_core.planning.evidence import NEVER, evidence_on
from veomni_core.tables import fit, render_table


def list_kernels(frozen: Frozen = False, json: AsJson = False) -> None:
    """Print every plugin, with the kernels that are left out and why, and every kernel by op and variant."""
    registry = discover()
    if json:
        plugins, conflicts = [_plugin(record) for record in registry.plugins], list(registry.describe_conflicts())
        print_json({"plugins": plugins, "conflicts": conflicts, "ops": _ops(registry)})
    else:
        installed = [(p.name, str(p), _state(p), str(len(p.kernels) if p.healthy else 0)) for p in registry.plugins]
        print(render_table(("plugin", "distribution", "state", "kernels"), installed, "Plugins"))
        ops = _ops(registry)
        for conflict in registry.describe_conflicts():
            print(fit(f"conflict: {conflict}"))
        rows = [
            (op["op"], op["field"], variant, ", ".join(kernel["name"] for kernel in kernels) or "-")
            for op in ops
            for variant, kernels in op["variants"].items()
        ]
        print(render_table(("op", "field", "variant", "kernels"), rows, "Ops"))
        for standing, kernels in _by_standing(ops).items():
            named = f"{len(kernels)} kernels (see veomni verify)" if standing == NEVER else ", ".join(kernels)
            print(fit(f"{standing}: {named}"))


def _by_standing(ops: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The kernels by how they stand, those without a certificate last."""
    found: dict[str, list[str]] = {}
    for op in ops:
        for variant, kernels in op["variants"].items():
            for kernel in kernels:
                found.setdefault(kernel["standing"], []).append(f"{op['op']}/{variant}:{kernel['name']}")
    return dict(sorted(found.items(), key=lambda item: (item[0] == NEVER, item[0])))


def _state(record: PluginRecord) -> str:
    left_out = "; ".join(f"left out: {skipped}" for skipped in record.skipped)
    return ": ".join(part for part in (record.status, record.problem or left_out) if part)


def _plugin(record: PluginRecord) -> dict[str, Any]:
    return {
        **{name: getattr(record, name) for name in ("name", "distribution", "version", "module")},
        **{name: getattr(record, name) for name in ("status", "problem", "traceback")},
        "kernels": [str(spec) for spec in record.kernels],
        "left_out": [{"kernel": str(skipped.spec), "reason": skipped.reason} for skipped in record.skipped],
    }


def _ops(registry: Registry) -> list[dict[str, Any]]:
    evidence = evidence_on(Hardware.cpu())  # which device is here isn't asked: that may import torch
    return [
        {
            "op": op.name,
            "field": op.config_field,
            "description": op.description,
            "variants": {
                variant: [
                    {
                        "name": spec.name,
                        "plugin": str(registry.plugin_of(spec)),
                        "preference": spec.preference,
                        "standing": evidence.standing_on_any_device(spec, registry.plugin_of(spec)),
                        "description": spec.description,
                    }
                    for spec in registry.kernels(op.name, variant)
                ]
                for variant in op.variants
            },
        }
        for _, op in sorted(registry.ops.items())
    ]
