"""What is measured of experts: counts from the router's choices, in a run's files, its progress and its report."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from veomni_trainer.loop.expert_loads import leaving, rows_sent
from veomni_trainer.report.charts import Series, draw_charts, draw_loads
from veomni_trainer.report.progress import describe

Train = Callable[..., bool]


def test_rows_between_ranks_are_those_that_the_choices_say() -> None:
    choices = torch.randint(0, 8, (4, 3, 50), generator=torch.Generator().manual_seed(0))  # [ranks, layers, choices]
    counts = torch.stack([torch.stack([layer.bincount(minlength=8) for layer in rank]) for rank in choices])
    sent = rows_sent(counts, 2)  # ranks 0 and 1 hold all experts together, and so do 2 and 3
    travelling = 0
    for rank in range(4):
        for layer in range(3):
            owners = choices[rank, layer] // 4
            for owner in range(2):
                assert sent[rank // 2, rank % 2, layer, owner] == (owners == owner).sum()
            travelling += int((owners != rank % 2).sum())
    assert leaving(sent) == travelling


@pytest.mark.thorough
def test_a_run_counts_the_steps_that_it_logs(moe_data: dict[str, Any], train: Train, run: Path) -> None:
    train(moe_data, "train.expert_loads=true", "train.log_every=4", "train.gradient_checkpointing=true")
    rows = [json.loads(line) for line in (run / "expert_rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == [4, 6]
    choices = 2 * 2 * 32 * 2  # micro-batches x sequences x tokens x choices; a forward that is repeated counts once
    assert [sum(layer) for row in rows for layer in row["rows"]] == [choices] * 4
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for row, counted in zip(metrics, rows, strict=True):
        assert row["expert_load"] == pytest.approx(np.mean([4 * max(layer) / choices for layer in counted["rows"]]))
        assert not {"expert_rows", "rank_load", "dispatch_bytes"} & set(row)
    assert "Experts&#39; loads" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_measuring_changes_no_loss_and_leaves_no_hook(
    moe_data: dict[str, Any], train: Train, run: Path, losses: Callable[[Path], list[tuple[int, float]]]
) -> None:
    train(moe_data)
    plain = losses(run)
    assert not (run / "expert_rows.jsonl").exists()
    hooked = 0
    original = torch.nn.Module.register_forward_pre_hook

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal hooked
        hooked += 1
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "register_forward_pre_hook", counted)
        train(moe_data, "train.expert_loads=true", "train.log_every=3", overwrite=True)
    assert hooked == 2 * 2 * 2  # logged steps x micro-batches x layers
    assert losses(run) == [row for row in plain if row[0] % 3 == 0]


def test_progress_and_charts_have_what_was_measured() -> None:
    row = {"step": 1, "loss": 2.0, "tokens_per_second": 10.0, "peak_memory_bytes": 10**9, "step_seconds": 1.0}
    loads = {"expert_load": 1.5, "rank_load": 1.25, "dispatch_bytes": 3 * 10**9}
    assert describe(row | loads) == "loss 2.0000  10 tok/s  1.00 GB  experts 1.50x  ranks 1.25x  sent 3.00 GB"
    series = Series("a run", "mine", [row | loads, row | loads | {"step": 2}])
    titles = [chart.title for chart in draw_charts(series)]
    assert titles == ["Loss", "Busiest expert", "Busiest rank", "Token dispatch", "Step time", "Peak memory"]


@pytest.mark.parametrize("steps, layers, experts", [(5, 2, 4), (700, 8, 64), (1, 1, 2)])
def test_the_heat_map_is_small_and_bright_where_experts_are_busy(steps: int, layers: int, experts: int) -> None:
    even, busy = [[10] * experts] * layers, [[10] * (experts - 1) + [1000]] * layers
    rows = [{"step": step, "rows": busy if step * 2 > steps else even} for step in range(1, steps + 1)]
    chart = draw_loads(rows)
    assert "layer" in chart.svg and len(chart.svg) < 200_000
    encoded = max(re.findall(r"data:image/png;base64,([^\"]+)", chart.svg), key=len)
    image = imread(io.BytesIO(base64.b64decode(encoded)), format="png")[..., :3].sum(-1)
    if steps > 1:
        assert image[:, -1].max() > image[:, 0].max() + 0.5
