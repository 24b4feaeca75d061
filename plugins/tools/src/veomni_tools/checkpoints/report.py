"""What ``veomni checkpoint inspect`` says of a checkpoint, as plain data and in lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from veomni_core.commands import fit, render_table
from veomni_tools.checkpoints.checkpoint import Checkpoint
from veomni_tools.checkpoints.experts import Layout

_FEW = 5


def examined(checkpoint: Checkpoint) -> dict[str, Any]:
    """What there is: files, dtypes, the layout of the experts, and how the keys fit the model."""
    tensors = checkpoint.files.tensors.values()
    sizes: Counter[str] = Counter()
    for each in tensors:
        sizes[each.dtype] += each.nbytes
    layouts = checkpoint.layouts
    squares = [each.whole for each in checkpoint.experts.values() if each.whole and each.parameter.is_square]
    return {
        "folder": str(checkpoint.files.folder),
        "model": type(checkpoint.model).__name__,
        "files": [path.name for path in checkpoint.files.files],
        "tensors": len(tensors),
        "parameters": sum(math.prod(each.shape) for each in tensors),
        "bytes": checkpoint.files.nbytes,
        "bytes_by_dtype": dict(sizes.most_common()),
        "quantization": checkpoint.quantization or None,
        "converter": checkpoint.converter or None,
        "experts": {path: str(each) if each else None for path, each in layouts.items()},
        "square": squares,
        "layouts_that_from_pretrained_reads": [str(each) for each in readable(checkpoint)],
        "missing": checkpoint.missing,
        "extra": checkpoint.extra,
        "misshapen": checkpoint.misshapen,
    }


def readable(checkpoint: Checkpoint) -> list[Layout]:
    """The layouts of this model's experts that ``from_pretrained`` reads."""
    if not checkpoint.parameters:
        return []
    return [each for each in Layout if all(p.is_read_in(each) for p in checkpoint.parameters.values())]


def fits(found: Mapping[str, Any]) -> bool:
    """Whether all of the model is there, in a known layout, and nothing of another shape."""
    return not (found["missing"] or found["misshapen"] or None in found["experts"].values())


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """``found``, for people."""
    files = len(found["files"])
    yield fit(
        f"{found['folder']}: {found['model']}, {found['tensors']:,} tensors of {found['parameters']:,} numbers in "
        f"{files} {'file' if files == 1 else 'files'}, {found['bytes']:,} bytes"
    )
    yield render_table(("dtype", "bytes"), [(name, f"{size:,}") for name, size in found["bytes_by_dtype"].items()])
    if found["quantization"]:
        yield fit(f"quantized by {found['quantization']}; keys are compared as they are")
    if found["converter"]:
        yield fit(f"read by a plugin's {found['converter']}: what is said here is of the tensors that it gives")
    kinds = Counter(found["experts"].values())
    for layout, count in kinds.items():
        where = "" if len(kinds) == 1 else f": {next(p for p, each in found['experts'].items() if each == layout)} ..."
        yield fit(f"experts: {layout or 'not decided'} in {count} {'layer' if count == 1 else 'layers'}{where}")
    if not kinds:
        yield "experts: none"
    else:
        yield fit(f"from_pretrained reads: {', '.join(found['layouts_that_from_pretrained_reads']) or 'none of them'}")
    if found["square"]:
        yield fit(f"square, so decided by what is beside it: {_some(found['square'])}")
    for what in ("missing", "extra", "misshapen"):
        if found[what]:
            yield fit(f"{what}: {len(found[what])}: {_some(found[what])}")
    if not (found["missing"] or found["extra"] or found["misshapen"]):
        yield "keys: all that the model has, and nothing else"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
