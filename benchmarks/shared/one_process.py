"""What scripts measure in this process, a line of JSON for each: comparisons of revisions and of processes ask it.

    python -m benchmarks.shared.one_process benchmarks/causal_conv1d/causal_conv1d.py --shapes float32 --ours

Of several scripts one that fails says so in its line, and the others are measured. With ``--packages-of ROOT`` the
packages that are imported must be those of the repository at ``ROOT``. What that revision lacks is said in place of
figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.shared.benchmark import benchmark_of

_OURS = "veomni_"
# glibc otherwise gives freed memory back to the system and faults it in again page by page, in some processes at every
# call and in others at none: swiglu_mlp then took 6 or 28 ms.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class Lacking(Exception):
    """The revision has no such kernel; the message says what was looked for."""


def measured(script: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the script's ``BENCHMARK`` measures, by the shape's name."""
    benchmark, device = benchmark_of(script), options.device
    shapes = benchmark.shapes.get(device, {})
    names = list(shapes)[:1] if options.first else options.shapes
    if unknown := [name for name in names if name not in shapes]:
        raise SystemExit(f"{script} has no shape {unknown} on {device}; it has {list(shapes)}")
    if not shapes:
        raise SystemExit(f"{script} has no shape on {device}; it has shapes on {' and '.join(benchmark.shapes)}")
    if benchmark.threads:
        import torch

        torch.set_num_threads(benchmark.threads)
    only = benchmark.ours if options.ours else None
    turns = options.repeats or benchmark.repeats
    figures = {name: benchmark.measure(shapes[name], device, turns, only) for name in names or shapes}
    if empty := [name for name, found in figures.items() if not found["seconds"]]:
        raise SystemExit(f"{script} measured none of {list(benchmark.ours)} at {empty}")
    return figures


def package_folders(root: Path) -> list[Path]:
    """Where a revision's packages lie."""
    return [root / "core" / "src", *sorted((root / "plugins").glob("*/src"))]


def lacking(error: BaseException) -> str | None:
    """Why the error means that a package of ours has no such module or name; ``None`` for every other error."""
    if isinstance(error, Lacking):
        return str(error)
    if isinstance(error, ImportError) and (error.name or "").startswith(_OURS):
        return str(error)
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType) and error.obj.__name__.startswith(_OURS):
        return str(error)
    return None


def refuse_others(root: Path) -> None:
    """Refuse packages of ours that are not those of the repository at ``root``.

    Raises:
        Lacking: ``root`` has no such package, and an installed one took its place.
        SystemExit: ``root`` has the package, but another one was imported.
    """
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(_OURS) or "." in name:
            continue
        file = Path(module.__file__ or "").resolve()
        if not any(file.is_relative_to(folder) for folder in package_folders(root.resolve())):
            if not any((folder / name).is_dir() for folder in package_folders(root)):
                raise Lacking(f"No package named {name!r}")
            raise SystemExit(f"{name} was imported from {file}, and not from {root}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="NAME", help="all that it has, unless they are given"
    )
    parser.add_argument("--first", action="store_true", help="each script's first shape alone")
    parser.add_argument("--ours", action="store_true", help="this repository's kernels, without their peers")
    parser.add_argument("--repeats", type=int, help="turns; the script's own number, unless it is given")
    parser.add_argument("--packages-of", type=Path, metavar="ROOT", help="refuse packages of other folders")
    options = parser.parse_args()
    for script in options.scripts:
        print(json.dumps({"script": str(script), **_outcome(script, options)}), flush=True)


def _outcome(script: Path, options: argparse.Namespace) -> dict[str, Any]:
    try:
        figures = measured(script, options)
        if options.packages_of:
            refuse_others(options.packages_of)
    except (Exception, SystemExit) as error:
        if options.packages_of and (why := lacking(error)):
            return {"lacks": why}
        if len(options.scripts) == 1:
            raise
        return {"failed": "\n".join(traceback.format_exc().splitlines()[-8:])}
    return {"figures": figures}


if __name__ == "__main__":
    main()
