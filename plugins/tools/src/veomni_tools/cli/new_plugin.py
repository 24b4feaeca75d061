"""``veomni new-plugin``: the first state of a plugin, which is installed, found, checked and built at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veomni_conformance.cli.names import DEVICES
from veomni_core.descriptions.hardware import ANY_DEVICE
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConfigError
from veomni_core.planning.config import known_presets
from veomni_tools.scaffold import kinds
from veomni_tools.scaffold.kinds import OPS, Kind
from veomni_tools.scaffold.names import checked_names
from veomni_tools.scaffold.render import LICENCES, rendered, write


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The plugin's name, e.g. acme; a job writes it too.")],
    op: Annotated[
        str | None, typer.Option("--op", help=f"A kernel in PyTorch for this op: {', '.join(OPS)}. [rms_norm]")
    ] = None,
    new_op: Annotated[
        str | None, typer.Option("--new-op", metavar="NAME", help="An op that the core doesn't know, and its kernel.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="A device type as torch calls it, and a kernel.")
    ] = None,
    triton: Annotated[bool, typer.Option("--triton", help="An RMSNorm kernel in Triton.")] = False,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where to write it: a folder that doesn't exist. [veomni-NAME]")
    ] = None,
    licence: Annotated[str, typer.Option("--licence", help=f"One of {', '.join(LICENCES)}.")] = "apache-2.0",
) -> None:
    """Write a plugin with a kernel, its backward, tests, CI and a README. Nothing is overwritten.

    Of --op, --new-op, --device and --triton one can be given; without any it is --op rms_norm.
    """
    registry = discover()
    kind = _kind(op, new_op, device, triton, registry)
    here = registry.plugins
    names = checked_names(name, {record.name for record in here} | {record.distribution for record in here})
    folder = folder or Path(names.distribution)
    write(rendered(names, kind, licence), folder)
    print(f"{folder} is written; {folder / 'README.md'} says how to install, check and build it")


def _kind(op: str | None, op_name: str | None, device: str | None, triton: bool, registry: Registry) -> Kind:
    """The kind that the options ask for.

    Raises:
        ConfigError: two are given, or one has a name that can't be used.
    """
    given = {"--op": op, "--new-op": op_name, "--device": device, "--triton": triton or None}
    asked = [option for option, value in given.items() if value is not None]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)}: a new plugin is of one kind; give one of {', '.join(given)}")
    if op_name is not None:
        fields = {op.config_field.removesuffix("_implementation") for op in registry.ops.values()}
        return kinds.new_op(op_name, {*registry.ops, *fields})
    if device is not None:
        return kinds.device_type(device, {ANY_DEVICE, *DEVICES, *known_presets(registry), *registry.devices})
    return kinds.triton_kernel() if triton else kinds.kernel_of(op if op is not None else OPS[0])
