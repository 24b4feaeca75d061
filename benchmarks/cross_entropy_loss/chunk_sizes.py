"""How large chunk_loss's chunks should be: time and peak memory over chunk sizes, against transformers' own loss.

    python benchmarks/cross_entropy_loss/chunk_sizes.py --device cuda --name chunk_sizes_h200

Writes ``benchmarks/results/chunk_sizes.json``. A chunk is said in the bytes of its float32 logits. All sizes
and the loss of transformers take turns in each of several processes; a time is the median over processes of the median
turn, of forward and backward. Memory is the peak of what PyTorch's allocator holds above the inputs, gradients of the
inputs included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.in_processes import Calls, figures, leaf, measured_in_processes
from benchmarks.shared.results import machine, write_results
from veomni_torch import cross_entropy_loss, logit_chunks

MIB = 1 << 20
THEIRS, AS_SET = "transformers", "chunk_loss"


@dataclass(frozen=True)
class Setting:
    """A batch, the sizes of chunks to try on it, and the name of the constant that holds the one in use."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype
    mib: tuple[int, ...]
    constant: str

    @property
    def in_use(self) -> int:
        """MiB of a chunk as the kernel has it."""
        return int(getattr(logit_chunks, self.constant)) // MIB


# A small vocabulary (Llama 2's) on a CPU, where the largest chunk is all of the batch; a large one (Qwen3's) on a GPU.
SETTINGS = {
    "cpu": Setting(2048, 256, 32000, torch.float32, (16, 32, 64, 128, 250), "CPU_CHUNK_BYTES"),
    "cuda": Setting(8192, 2048, 151936, torch.bfloat16, (128, 256, 512, 1024, 2048), "ACCELERATOR_CHUNK_BYTES"),
}


def contenders(setting: Setting, device: str) -> tuple[Calls, list[Tensor]]:
    """Transformers' loss, chunk_loss by the MiB of its chunks, and chunk_loss with those that it chooses."""
    states = leaf(setting.tokens, setting.hidden, device=device, dtype=setting.dtype)
    weight = leaf(setting.vocabulary, setting.hidden, scale=setting.hidden**-0.5, device=device, dtype=setting.dtype)
    labels = torch.randint(setting.vocabulary, (setting.tokens,), device=device)

    def theirs() -> Tensor:
        loss: Tensor = ForCausalLMLoss(F.linear(states, weight), None, setting.vocabulary, shift_labels=labels)
        return loss

    def chunked(mib: int) -> Tensor:
        with patch.object(logit_chunks, setting.constant, mib * MIB):
            return cross_entropy_loss.causal(states, weight, labels)

    calls: Calls = {str(mib): partial(chunked, mib) for mib in setting.mib}
    own = partial(cross_entropy_loss.causal, states, weight, labels)
    return {THEIRS: theirs, **calls, AS_SET: own}, [states, weight]


def measure(setting: Setting, device: str, repeats: int, only: Collection[str] | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    calls, inputs = contenders(setting, device)
    every_size = [name for name in calls if name != AS_SET]  # which is one of them
    return figures(calls, inputs, repeats, every_size if only is None else only)


SHAPE = "all"
BENCHMARK = Benchmark({device: {SHAPE: each} for device, each in SETTINGS.items()}, measure, ours=(AS_SET,))


def row(name: str, measured: dict[str, Any], vocabulary: int) -> tuple[str, ...]:
    times, memory = measured["seconds"], {name: peak["both"] for name, peak in measured["peak bytes"].items()}
    whole = name == THEIRS
    return (
        "transformers, all at once" if whole else f"{name} MiB",
        "-" if whole else str(int(name) * MIB // (4 * vocabulary)),
        f"{1e3 * times[name]:.1f} ms",
        f"{times[name] / times[THEIRS]:.2f}",
        f"{memory[name] / MIB:.1f} MiB",
        f"{memory[name] / memory[THEIRS]:.0%}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SETTINGS, default="cpu")
    parser.add_argument("--repeats", type=int, default=BENCHMARK.repeats)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--name", default="chunk_sizes", help="of the result file")
    options = parser.parse_args()
    measured = measured_in_processes(__file__, options.device, SHAPE, options.repeats, options.processes)
    setting = SETTINGS[options.device]
    shape = f"T={setting.tokens} H={setting.hidden} V={setting.vocabulary}"
    write_results(
        options.name,
        f"chunk_loss over chunk sizes: {shape}, {str(setting.dtype).removeprefix('torch.')}",
        {**measured, "MiB in use": setting.in_use, "machine": machine()},
        ("logits of a chunk", "rows", "time", "of transformers' time", "peak memory", "of transformers' memory"),
        [row(name, measured, setting.vocabulary) for name in measured["seconds"]],
        script=__file__,
    )


if __name__ == "__main__":
    main()
