"""``veomni new-plugin``: the first state of a plugin, which is installed, found, checked and built at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veomni_core.discovery.discover import discover
from veomni_core.scaffold.names import checked_names
from veomni_core.scaffold.render import LICENCES, OPS, rendered, write


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The plugin's name, e.g. acme; a job writes it too.")],
    op: Annotated[str, typer.Option("--op", help=f"The op of its kernel: {', '.join(OPS)}.")] = OPS[0],
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where to write it: a folder that doesn't exist. [veomni-NAME]")
    ] = None,
    licence: Annotated[str, typer.Option("--licence", help=f"One of {', '.join(LICENCES)}.")] = "apache-2.0",
) -> None:
    """Write a plugin with a kernel, its backward, tests, CI and a README. Nothing is overwritten."""
    here = discover().plugins
    names = checked_names(name, {record.name for record in here} | {record.distribution for record in here})
    folder = folder or Path(names.distribution)
    write(rendered(names, op, licence), folder)
    print(f"{folder} is written; {folder / 'README.md'} says how to install, check and build it")
