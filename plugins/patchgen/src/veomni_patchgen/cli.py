"""``veomni patchgen``: writes modeling files from patches, lists patches, and checks files that were written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from veomni_core.commands import fit, render_table
from veomni_core.errors import ConfigError
from veomni_patchgen.config import PatchConfig
from veomni_patchgen.drift import drifted, moved
from veomni_patchgen.errors import PatchError
from veomni_patchgen.generation import Generated, generate
from veomni_patchgen.patch_file import configs_in, load_patches
from veomni_patchgen.source import Source, read_code, read_source


def patchgen(
    patches: Annotated[
        list[str] | None, typer.Argument(metavar="PATCH...", help="Files or modules with a PatchConfig; or folders.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder to write to; generated/ beside each PATCH without it."),
    ] = None,
    all_patches: Annotated[bool, typer.Option("--all", help="Every file with a PatchConfig, here and below.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="List what there is, and write nothing.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print how the file differs from transformers' own.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a file is not what would be written now.")
    ] = False,
    fix: Annotated[bool, typer.Option("--fix", help="With --check: write what differs.")] = False,
    source: Annotated[
        Path | None, typer.Option("--source", help="Read this modeling file instead of the installed one.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what came along and what was left out.")
    ] = False,
) -> None:
    """Write modeling code with patches in it, or check that what was written is up to date and computes the same."""
    named = list(patches or ([] if not (all_patches or list_only) else ["."]))
    if not named:
        raise ConfigError("name a file or a module of patches, or write --all")
    found, failed = list[tuple[str, PatchConfig]](), False
    for name in (name for each in named for name in _files(each)):
        try:
            found += [(name, config) for config in configs_in(load_patches(name)).values()]
        except PatchError as error:
            if not check:
                raise
            print(fit(str(error)))
            failed = True
    if not found and not failed:
        raise ConfigError(f"there is no PatchConfig in {', '.join(named)}")
    if list_only:
        rows = [
            (name, config.source_module, config.target_file, str(len(config.all_patches()))) for name, config in found
        ]
        print(render_table(("patches in", "of", "written to", "patches"), rows))
        return
    files = [(output or _beside(name)) / config.target_file for name, config in found]
    for file in files:
        if files.count(file) > 1:
            raise ConfigError(f"{files.count(file)} configs write {file}: give them other names, or -o other folders")
    for name, config in found:
        folder = output or _beside(name)
        try:
            generated = generate(config, _other(config, source))
        except PatchError as error:
            if not check:
                raise
            for line in (*str(error).splitlines(), *_moved(config, source, folder / config.target_file)):
                print(fit(f"{name}: {line}"))
            failed = True
            continue
        if diff:
            print(generated.diff, end="")
        if check or fix:
            failed |= not _checked(generated, folder, fix, proves=source is None)
        else:
            _write(generated, folder)
        for note in generated.notes if verbose else ():
            print(fit(f"  {note}"))
    if failed:
        raise typer.Exit(1)


def _moved(config: PatchConfig, source: Path | None, file: Path) -> list[str]:
    """What moved upstream under patches that no longer fit; nothing where a file can't be read, which is said."""
    try:
        return moved(config, _other(config, source) or read_source(config.source_module), file)
    except (ConfigError, PatchError):
        return []


def _checked(generated: Generated, folder: Path, fix: bool, proves: bool) -> bool:
    """Whether the files in ``folder`` are up to date, or have been written anew, and the model computes the same."""
    config = generated.config
    problems = drifted(generated, folder)
    for line in problems:
        print(fit(line))
    for patch in config.all_patches():
        if patch.declares:
            print(fit(f"{patch.title} declares: {patch.declares}"))
    if problems and fix:
        _write(generated, folder)
    if not proves or config.make_example is None:
        why = "it has no @config.example" if proves else "upstream's code is not the installed one"
        print(fit(f"{config.target_file}: {'up to date; ' if not problems else ''}not compared with upstream: {why}"))
        return not problems or fix
    from veomni_patchgen.proof import prove

    try:
        print(fit(f"{config.target_file}: {'up to date; ' if not problems else ''}{prove(config)}"))
    except PatchError as error:
        print(fit(str(error)))
        return False
    return not problems or fix


def _write(generated: Generated, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / generated.config.target_file
    file.write_text(generated.text, encoding="utf-8")
    file.with_suffix(".diff").write_text(generated.diff, encoding="utf-8")
    unformatted = "" if generated.is_formatted else "; not formatted, since no ruff is here (pip install ruff)"
    print(fit(f"{file}: {len(generated.config.all_patches())} patches of {generated.source.name}{unformatted}"))


def _other(config: PatchConfig, file: Path | None) -> Source | None:
    if file is None:
        return None
    if not file.is_file():
        raise ConfigError(f"--source {file}: there is no such file")
    return Source(config.source_module, read_code(file), read_source(config.source_module).version)


def _files(name: str) -> Iterator[str]:
    """``name``, or the files with a ``PatchConfig`` below it if it is a folder."""
    if not Path(name).is_dir():
        yield name
        return
    for path in sorted(Path(name).rglob("*.py")):
        if not any(part.startswith(".") for part in path.parts) and _has_config(path):
            yield str(path)


def _has_config(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    if "PatchConfig" not in text:
        return False
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return True  # importing it says what is wrong
    made = [each.value for each in body if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value]
    calls = (node.func for value in made for node in ast.walk(value) if isinstance(node, ast.Call))
    return any(getattr(called, "id", getattr(called, "attr", "")) == "PatchConfig" for called in calls)


def _beside(name: str) -> Path:
    return (Path(name).parent if name.endswith(".py") else Path()) / "generated"
