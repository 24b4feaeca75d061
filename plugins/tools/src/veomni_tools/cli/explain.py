"""``veomni explain OP``: why each kernel would or would not run here, and what installing a package would add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from veomni_conformance.cli.names import complete_op, find_op
from veomni_core.cli.output import AsJson, HardwareName, print_json
from veomni_core.descriptions.references import load_attribute
from veomni_core.discovery.discover import discover
from veomni_core.errors import ConfigError
from veomni_core.planning.evidence import evidence_on
from veomni_core.planning.selection import Selection
from veomni_core.tables import fit, render_table

SOURCE = "source"  # the subcommand that prints a bound module's code


def explain(
    op: Annotated[
        str,
        typer.Argument(
            help="An op (rms_norm) or its config field; with --source a job's YAML or a model type.",
            autocompletion=complete_op,
        ),
    ],
    hardware: HardwareName = None,
    json: AsJson = False,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="PATH", help="Print the forward that runs at this module of a bound model."),
    ] = None,
) -> None:
    """For every kernel of an op, say whether it runs here and why not; what ``auto`` takes, and what to install."""
    registry = discover()
    if source is not None:
        if SOURCE not in registry.commands or json:
            needs = "prints code, not JSON" if json else "needs a plugin that reads models: veomni-transformers"
            raise ConfigError(f"--source {needs}")
        load_attribute(registry.commands[SOURCE].target)(op, source, hardware)
        return
    spec = find_op(registry, op)
    target = registry.named_hardware(hardware) if hardware else registry.detect_hardware()
    selection = Selection(registry, target, {}, evidence=evidence_on(target))
    rows: list[dict[str, Any]] = [
        {
            "variant": kernel.variant,
            "kernel": kernel.name,
            "plugin": str(registry.plugin_of(kernel)),
            "preference": kernel.preference,
            "runs": not (reasons := selection.why_not(kernel))
            and any(not selection.unverified(kernel, (dtype,)) for dtype in kernel.dtypes),
            "reasons": list(reasons),
            "failed_verify": list(selection.failures(kernel)),
            "unverified": [] if reasons else list(selection.unverified(kernel)),
            "options": [asdict(option) for option in kernel.options],
            "assumes": [] if target.detected else list(kernel.hardware.chosen_for(target).packages),
        }
        for kernel in registry.kernels(spec.name)
    ]
    absent = {
        value: registry.absence(spec.name, value)
        for value in registry.known_values(spec.name)
        if registry.absence(spec.name, value)
    }
    auto = {variant: selection.auto(spec.name, variant) for variant in spec.variants}
    if json:
        print_json(
            {
                "op": spec.name,
                "field": spec.config_field,
                "hardware": target.describe(),
                "kernels": rows,
                "not_here": absent,
                "auto": {variant: verdict.kernel for variant, verdict in auto.items()},
            }
        )
        return
    table = [
        (
            r["variant"],
            r["kernel"],
            r["plugin"],
            str(r["preference"]),
            "; ".join([_runs(r), *r["failed_verify"]]),
        )
        for r in rows
    ] + [("", name, "-", "", f"no: {reason}") for name, reason in absent.items()]
    title = f"{spec.name} ({spec.config_field}) on {target.describe()}"
    print(render_table(("variant", "kernel", "plugin", "preference", "runs here"), table, title))
    for row in rows:
        for option in row["options"]:
            print(fit(f"option of {row['kernel']} for {row['variant']}: {_option(option)}"))
    for variant, verdict in auto.items():
        print(fit(f"auto takes {verdict.kernel} for {variant}: {verdict.reason}"))
    for name, distribution in spec.published.items():
        if distribution and name in absent:
            print(fit(f"pip install {distribution} would add {name}, if its own requirements are met"))


def _runs(row: Mapping[str, Any]) -> str:
    why = "; ".join((*row["reasons"], *row["unverified"]))
    return f"yes{why and f'; {why}'}" if row["runs"] else f"no: {why}"


def _option(option: dict[str, Any]) -> str:
    limits = [f"one of {', '.join(map(str, option['choices']))}"] if option["choices"] else []
    limits += [f"at least {option['minimum']:g}"] if option["minimum"] is not None else []
    facts = [f"{option['name']}={option['default']!r}", *limits, option["description"]]
    return ", ".join(filter(None, facts))
