"""How long jobs on a gigabyte of JSONL take to their first step, and in how much memory: first and later starts.

Writes ``benchmarks/results/large_corpus.json``. Each start is the real command, with a model of two layers and
two steps. Memory is the peak of the process's resident memory, in which mapped pages count that it has touched.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.measuring import command
from benchmarks.shared.results import machine, write_results

_MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 1024,
}
STARTS = {
    "no data to speak of": ("data.files=small.jsonl",),
    "first": (),
    "second": (),
    "packed, from the same tokens": ("data.packing=true",),
}


def write_corpus(path: Path, size: int) -> int:
    """Documents of 100 to 4,000 characters, of random words; returns how many."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    pages = [" ".join(draw.choices(words, k=3000)) for _ in range(50)]
    documents = 0
    with path.open("w", encoding="utf-8") as stream:
        while stream.tell() < size:
            for _ in range(1000):
                start = draw.randrange(10_000)
                text = draw.choice(pages)[start : start + int(100 * 40 ** draw.random())]
                stream.write(json.dumps({"text": text}) + "\n")
                documents += 1
    return documents


def start(job: Path, changes: tuple[str, ...]) -> dict[str, Any]:
    """Seconds from the command to the end of its first step; the whole command's processor time and peak memory."""
    sets = [part for change in changes for part in ("--set", change)]
    run = command(
        [sys.executable, "-m", "veomni_core.cli", "train", str(job), "--overwrite", *sets], "step 1/", job.parent
    )
    return {
        "seconds to the first step": run.seconds,
        "processor seconds": run.processor_seconds,
        "peak memory": run.peak_bytes,
        "data": next(line.removeprefix("data: ") for line in run.lines if line.startswith("data: ")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=10**9, help="bytes of JSONL")
    parser.add_argument("--folder", type=Path, help="where three times as much fits; by default the temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        documents = write_corpus(folder / "large.jsonl", arguments.size)
        write_corpus(folder / "small.jsonl", 10**5)
        job = {
            "model": {"config": _MODEL, "dtype": "float32", "ops_implementation": {"preset": "auto"}},
            "data": {"files": "large.jsonl", "tokenizer": "bytes", "sequence_length": 1024, "cache": "tokens"},
            "train": {"output_dir": "run", "steps": 2, "batch_size": 2, "device": "cpu", "save_every": "never"},
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        size = (folder / "large.jsonl").stat().st_size
        found = {label: start(folder / "job.yaml", changes) for label, changes in STARTS.items()}
    write_results(
        "large_corpus",
        f"A corpus of {size / 1e9:.1f} GB: from the command to the first step",
        {"machine": machine(), "bytes": size, "documents": documents, "starts": found},
        ("start", "seconds to the first step", "processor seconds of the command", "peak memory"),
        [
            (
                label,
                f"{each['seconds to the first step']:.1f}",
                f"{each['processor seconds']:.1f}",
                f"{each['peak memory'] / 2**30:.2f} GiB",
            )
            for label, each in found.items()
        ],
        script=__file__,
    )


if __name__ == "__main__":
    main()
