"""``veomni checkpoint``: looks at the weights in a folder, stores them in another layout, and compares two folders."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer

from veomni_core.commands import AsJson, fit, print_json
from veomni_core.errors import ConfigError, did_you_mean

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.md", "LICENSE*")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_LAYOUTS = ("per_expert", "fused", "fused_transposed")

Config = Annotated[
    Path | None,
    typer.Option("--config", help="The model's config.json, or a folder with one; by default the folder's."),
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run; read it first.")
]
Square = Annotated[
    str | None,
    typer.Option("--square", metavar="LAYOUT", help="How experts are stored whose shape doesn't say it."),
]

checkpoint = typer.Typer(
    name="checkpoint",
    help="Look at the weights in a folder, store them in another layout, and compare two folders.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@checkpoint.command()
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A folder of safetensors, or a Hub id.")],
    config: Config = None,
    square: Square = None,
    trust_remote_code: Trust = False,
    json: AsJson = False,
) -> None:
    """Print the files, dtypes, the layout of the experts, and which keys are missing or extra; exit 1 if some are.

    Reads the headers of the files alone, and builds the config's model without weights.
    """
    from veomni_tools.checkpoints.report import examined, fits, lines

    found = examined(_checkpoint(path, config, trust_remote_code, square))
    if json:
        print_json(found)
    else:
        print(*lines(found), sep="\n")
    if not fits(found):
        raise typer.Exit(1)


@checkpoint.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="A", help="A folder of safetensors, or a Hub id.")],
    target: Annotated[Path, typer.Argument(metavar="B", help="The folder to write, which must not exist.")],
    layout: Annotated[
        str, typer.Option("--layout", help="How B stores experts: per_expert, fused or fused_transposed.")
    ],
    shard_size: Annotated[str, typer.Option("--shard-size", help="The size of a file of B, as 5GB or 500MB.")] = "5GB",
    config: Config = None,
    square: Square = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write the weights of A to B with the experts in another layout, in the memory of one expert.

    All other tensors are copied under their names, config, tokenizer and generation files too. What a plugin's
    converter takes is written under the model's names. B appears when it is whole; the same command goes on where an
    earlier one was killed.
    """
    from veomni_tools.checkpoints.conversion import converted
    from veomni_tools.checkpoints.report import readable
    from veomni_tools.checkpoints.streamed_files import write_folder

    wanted = _layout("--layout", layout)
    size = _bytes(shard_size)
    if target.exists():
        what = "is what would be read" if Path(source).exists() and target.samefile(source) else "exists"
        raise ConfigError(f"{target} {what}; name a folder that doesn't exist")
    read = _checkpoint(source, config, trust_remote_code, square)
    read.refuse_quantized("convert")
    if not read.parameters and not read.converter:
        raise ConfigError(
            f"{type(read.model).__name__} has no experts, so there is one layout of it: there is nothing to do"
        )
    read.refuse_incomplete_experts()
    if {*read.layouts.values()} == {wanted} and not read.converter:
        raise ConfigError(f"{source} is stored as {layout} already: there is nothing to do")
    folder = read.files.folder
    beside = {path.name: path for pattern in _COPIED for path in sorted(folder.glob(pattern)) if path.is_file()}
    beside = {name: path for name, path in beside.items() if not name.endswith(".index.json")}
    if config is not None and "config.json" not in beside:
        beside["config.json"] = config / "config.json" if config.is_dir() else config
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in read.files.files]
    written = write_folder(
        target,
        converted(read, wanted),
        size,
        layout,
        [*beside.values()],
        json_text.dumps([str(folder.resolve()), stats]),
    )
    what = f"experts {layout}" if read.parameters else f"as {read.converter} gives it"
    print(fit(f"{target}: {written} files written, {what}, {read.files.nbytes:,} bytes"))
    if read.missing or read.extra or read.misshapen:
        keys = f"{len(read.missing)} keys missing, {len(read.extra)} extra, {len(read.misshapen)} of other shapes"
        print(fit(f"as in {source}: {keys} (veomni checkpoint inspect)"))
    if read.parameters and wanted not in (reads := readable(read)):
        others = " or ".join(reads)
        print(
            fit(f"from_pretrained does not read {type(read.model).__name__} in this layout, but {others or 'no other'}")
        )


@checkpoint.command()
def verify(
    first: Annotated[str, typer.Argument(metavar="A", help="A folder of safetensors, or a Hub id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    config: Config = None,
    square: Square = None,
    trust_remote_code: Trust = False,
    forward: Annotated[
        bool, typer.Option("--forward/--no-forward", help="Also load both, and compare their logits for a few tokens.")
    ] = True,
) -> None:
    """Compare two folders: keys, bits (experts one by one, whatever their layouts), logits; exit 1 if they differ."""
    from veomni_tools.checkpoints.verification import compare_forward, differences, fits_in_memory

    both = [_checkpoint(each, config, trust_remote_code, square) for each in (first, second)]
    for each in both:
        each.refuse_quantized("verify")
    shown = 0
    for shown, said in enumerate(differences(*both), start=1):
        if shown > 20:
            print("... and more")
            break
        print(fit(said))
    if shown:
        raise typer.Exit(1)
    print(fit(f"the same {len(both[0].files.tensors):,} and {len(both[1].files.tensors):,} tensors, bit for bit"))
    if not forward:
        return
    if not fits_in_memory(both[0]):
        print(fit("the forward is not compared: the model does not fit into the memory that is free"))
        return
    print(fit(compare_forward(both[0], both[1], trust_remote_code)))


def _checkpoint(path: str, config: Path | None, trust: bool, square: str | None) -> Any:
    from veomni_tools.checkpoints.checkpoint import Checkpoint
    from veomni_transformers.jobs.hub_snapshots import is_hub_id, snapshot

    folder = snapshot("checkpoint", path, with_weights=True) if is_hub_id(path) else Path(path)
    return Checkpoint(folder, config, trust, None if square is None else _layout("--square", square))


def _layout(option: str, name: str) -> Any:
    from veomni_tools.checkpoints.experts import Layout

    if name not in _LAYOUTS:
        raise ConfigError(f"{option}: there is no layout {name!r}. {did_you_mean(name, _LAYOUTS)}")
    return Layout(name)


def _bytes(size: str) -> int:
    number, unit = size[:-2].strip(), size[-2:].upper()
    try:
        found = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError):
        found = 0
    if found <= 0:
        raise ConfigError(f"--shard-size: {size!r} is no size; write 5GB or 500MB")
    return found
