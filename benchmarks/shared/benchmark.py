"""What a script says of itself, so that another program can ask it for one process's figures of one shape."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Measure(Protocol):
    """How one shape is measured in this process."""

    def __call__(self, shape: Any, device: str, repeats: int, only: Collection[str] | None = None) -> dict[str, Any]:
        """What JSON can hold, with two entries at least, by the contender's name.

        ``"seconds"`` has the median time of both passes, and ``"peak bytes"`` the memory that they take beyond what
        was held before, as ``{"both": bytes}``. ``"seconds as a graph"`` is the time of both passes replayed as a CUDA
        graph, of the contenders that can be captured: the GPU's share alone, which a busy host doesn't change.

        Args:
            shape: one of the benchmark's.
            device: where it is measured.
            repeats: turns on a wall clock. What is timed by CUDA events takes as many as fit into a time.
            only: the contenders that are asked for; ``None`` for all.
        """
        ...


@dataclass(frozen=True)
class Benchmark:
    """The ``BENCHMARK`` of a script.

    Attributes:
        shapes: by device, and there by name.
        measure: measures one of them.
        ours: the contenders that are kernels of this repository. The others are their peers.
        repeats: turns of a process, unless the caller says otherwise.
        threads: of a CPU; ``None`` for as many as torch takes.
    """

    shapes: Mapping[str, Mapping[str, Any]]
    measure: Measure
    ours: tuple[str, ...]
    repeats: int = 5
    threads: int | None = None


def benchmark_of(script: Path) -> Benchmark:
    """Import a script, and give its ``BENCHMARK``."""
    # Not under its own name: causal_conv1d is a library's, too.
    spec = importlib.util.spec_from_file_location("benchmark_script", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks up its annotations
    spec.loader.exec_module(module)
    found: Benchmark = module.BENCHMARK
    return found
