"""``veomni bisect``: which sites make a job's run leave the all-eager one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forked_processes import veomni
from veomni_core.errors import ConfigError, JobFileError
from veomni_trainer.bisect.sites import causes, find_causes

WriteJob = Callable[[dict[str, Any]], Path]
SITE = "model.layers.1.post_attention_layernorm"


@given(st.sets(st.integers(0, 40), min_size=1, max_size=5))
def test_every_part_that_does_it_alone_is_found(wanted: set[int]) -> None:
    runs = []

    def differs(on: tuple[int, ...]) -> bool:
        runs.append(on)
        return bool(wanted & {*on})

    assert causes(range(41), differs) == [(each,) for each in sorted(wanted)]
    assert len(runs) <= 2 * len(wanted) * 6


@given(st.sets(st.integers(0, 40), min_size=2, max_size=5))
def test_parts_that_do_it_only_together_are_found(wanted: set[int]) -> None:
    (found,) = causes(range(41), lambda on: wanted <= {*on})
    assert {*found} == wanted


@pytest.fixture
def planted(moe_data: dict[str, Any], plant: Callable[[], None]) -> dict[str, Any]:
    """A job of a mixture of experts with every kernel that there is, and a wrong one at one of its sites."""
    plant()
    fields = {"preset": "auto", "rms_norm_implementation": {SITE: "planted", "default": "torch"}}
    moe_data["model"]["ops_implementation"] = fields
    return moe_data


def found_in(job: Path, **options: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    found = find_causes(job, (), options.get("steps", 1), options.get("tolerance"), said.append)
    return found, said


@pytest.mark.thorough
def test_the_one_wrong_site_is_found_among_all_of_a_qwen3_moe(planted: dict[str, Any], write_job: WriteJob) -> None:
    found, said = found_in(write_job(planted))
    assert [[(site.field, str(site.spec), site.path) for site in cause] for cause in found.causes] == [
        [("rms_norm_implementation", "rms_norm/standard:planted", SITE)]
    ]
    assert (found.whole.step, found.whole.what[:15]) == (1, "the gradient of")  # the loss hardly tells
    assert any("moe_experts/standard:grouped_mm at 2 sites" in line and "agrees" in line for line in said)
    assert f"rms_norm/standard:planted at {SITE}" in found.describe()


@pytest.mark.thorough
def test_every_wrong_site_is_found(planted: dict[str, Any], write_job: WriteJob) -> None:
    planted["model"]["ops_implementation"]["rms_norm_implementation"] = "planted_for_heads"
    found, _ = found_in(write_job(planted))
    paths = [site.path for (site,) in found.causes]
    assert sorted(paths) == sorted(
        f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_norm", "k_norm")
    )


@pytest.mark.thorough
def test_runs_that_agree_have_no_cause(moe_data: dict[str, Any], write_job: WriteJob, run: Path) -> None:
    moe_data["model"]["ops_implementation"] = {"preset": "auto"}
    found, _ = found_in(write_job(moe_data))
    assert (found.whole, found.causes) == (None, ())
    assert "agree in 1 step(s)" in found.describe()
    assert not run.exists()


def test_the_command_tells_programs_the_site_and_exits_with_1(planted: dict[str, Any], write_job: WriteJob) -> None:
    told = veomni("bisect", write_job(planted), "--steps", "1", "--json")
    assert told.returncode == 1, told.stderr
    found = json.loads(told.stdout)
    assert found["causes"] == [
        [{"field": "rms_norm_implementation", "kernel": "rms_norm/standard:planted", "path": SITE}]
    ]
    assert found["differs"]["step"] == 1


def test_what_can_t_be_trained_is_refused(
    job_data: dict[str, Any], write_job: WriteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    from veomni_trainer.bisect.command import bisect

    job_data["train"]["stepz"] = 1
    with pytest.raises(JobFileError, match="stepz"):
        found_in(write_job(job_data))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it without torchrun"):
        bisect(write_job(job_data))
