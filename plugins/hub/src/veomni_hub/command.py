"""``veomni hub FOLDER``: which build variants a kernel of the Hub has, which is for this machine, and their digests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veomni_core.commands import render_table
from veomni_core.errors import ConfigError


def hub(folder: Annotated[Path, typer.Argument(help="A folder that holds build/, with its variants.")]) -> None:
    """Print each build variant with its digest, and whether this machine can load it."""
    from veomni_hub.build_variants import Fit, digest_of, variants_in  # imports torch when it is asked

    there = variants_in(folder)
    if not there:
        raise ConfigError(f"{folder} has no build/ with build variants in it; give the folder that holds build/")
    fit = Fit.of(there)
    rows = [(name, digest_of(path), fit.says_of(name)) for name, path in there.items()]
    print(render_table(("build variant", "digest", "fits here"), rows, str(folder)))
