"""Rows and bytes that a layer's token dispatch moves, counted from routings that are drawn: no rank is needed.

Writes ``benchmarks/results/token_dispatch.json``. ``engine`` is transformers' ``AllToAllEP``. Counted is what
leaves a rank in one forward, there and back with the counts; backward moves as much again, without counts. A test
holds the count against the rows that ranks really send.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.results import machine, write_results
from veomni_ops.dispatch_traffic import BY_CHOICE, BY_RANK, DispatchLayout, expected_rows, rows_sent

RANKS = (2, 4, 8, 16, 32, 64)
HIDDEN = (2048, 7168)
# Experts, choices, and whether expert n is chosen with a weight of 1 / n instead of all alike.
ROUTINGS = {
    "8 of 128, random": (128, 8, False),
    "8 of 256, random": (256, 8, False),
    "8 of 128, skewed": (128, 8, True),
}


def drawn(tokens: int, experts: int, choices: int, skewed: bool, seed: int) -> Tensor:
    """Distinct choices ``[tokens, choices]``, by the largest of noisy scores."""
    generator = torch.Generator().manual_seed(seed)
    noise = -torch.empty(tokens, experts).exponential_(generator=generator).log()  # Gumbel's
    score = -torch.arange(1, experts + 1).log() if skewed else 0.0
    # So that popular experts are not all on the first rank.
    shuffled = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    return shuffled[(noise + score).topk(choices).indices]


def counted(way: str, choices: list[Tensor], layout: DispatchLayout) -> dict[str, float]:
    """Rows per token that leave a rank, on average, and the rows that reach the busiest rank as a share of the mean."""
    sent = torch.tensor([rows_sent(way, index, rank, layout) for rank, index in enumerate(choices)])  # [from, to]
    tokens = sum(len(index) for index in choices)
    arriving = sent.sum(dim=0).double()
    return {"rows": float(sent.sum()) / tokens, "busiest": float(arriving.max() / arriving.mean())}


def measure(routing: str, ranks: int, tokens: int) -> dict[str, Any]:
    experts, k, skewed = ROUTINGS[routing]
    choices = [drawn(tokens, experts, k, skewed, seed) for seed in range(ranks)]
    found: dict[str, Any] = {"routing": routing, "ranks": ranks, "tokens of a rank": tokens}
    layouts = [DispatchLayout(ranks, experts, k, hidden) for hidden in HIDDEN]
    for way in (BY_CHOICE, BY_RANK):
        count = counted(way, choices, layouts[0])
        found[way] = {
            **count,
            "expected rows": None if skewed and way == BY_RANK else expected_rows(way, layouts[0]),
            "bytes a token": {
                layout.hidden: layout.bytes_of(way, count["rows"] * tokens) / tokens for layout in layouts
            },
        }
    return {**found, "layout": asdict(layouts[0])}


def row(found: dict[str, Any]) -> tuple[str, ...]:
    engine, dedup = found[BY_CHOICE], found[BY_RANK]

    def rows(of: dict[str, Any]) -> str:
        expected = of["expected rows"]
        return f"{of['rows']:.3f}" + ("" if expected is None else f" ({expected:.3f})")

    def bytes_at(hidden: int) -> str:
        theirs, ours = engine["bytes a token"][hidden], dedup["bytes a token"][hidden]
        return f"{theirs / 1024:.1f} / {ours / 1024:.1f} KiB, {ours / theirs:.0%}"

    return (
        found["routing"],
        str(found["ranks"]),
        rows(engine),
        rows(dedup),
        *(bytes_at(hidden) for hidden in HIDDEN),
        f"{engine['busiest']:.2f} / {dedup['busiest']:.2f}",
    )


COLUMNS = (
    "routing",
    "EP",
    "engine: rows a token (formula)",
    "alltoall_dedup: rows a token (formula)",
    *(f"bytes a token at H={hidden}, engine / alltoall_dedup" for hidden in HIDDEN),
    "busiest rank over the mean, engine / alltoall_dedup",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    options = parser.parse_args()
    cases = [measure(routing, ranks, options.tokens) for routing in ROUTINGS for ranks in RANKS]
    write_results(
        "token_dispatch",
        "Rows and bytes of a layer's token dispatch, counted",
        {"cases": cases, "machine": machine()},
        COLUMNS,
        map(row, cases),
        script=__file__,
    )


if __name__ == "__main__":
    main()
