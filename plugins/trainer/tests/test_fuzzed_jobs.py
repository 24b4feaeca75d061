"""No structure of a training job, and no ``--set``, ends in an untyped error before anything of the job is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fuzzing import KEYS, TEXTS, VALUES, bounded, typed_errors
from veomni_trainer.job.load import apply_overrides, dump_job, parse_job
from veomni_trainer.job.problems import known_paths
from veomni_trainer.job.resuming import flat_keys
from veomni_trainer.job.schema import Job

WHOLE: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}, "ops_implementation": {"preset": "eager"}},
    "data": {"files": "text.txt", "sequence_length": 32},
    "train": {"output_dir": "runs/fuzzed", "steps": 4, "batch_size": 2},
}
PATHS = st.sampled_from(known_paths(Job))
LIKELY = st.integers(-1, 9) | st.sampled_from(
    [True, False, "auto", "bf16", 0.5, 1e-3, ["a"], {"a": 1}, [{"files": "a"}]]
)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The whole job with one more value."""
    job = {section: dict(keys) for section, keys in WHOLE.items()}
    section, _, rest = path.partition(".")
    if not rest:
        return {**job, section: value}
    key, _, inner = rest.partition(".")
    job.setdefault(section, {})[key] = {inner: value} if inner else value
    return job


@bounded(300)
@given(st.lists(st.tuples(PATHS, LIKELY | VALUES), min_size=1, max_size=2))
def test_a_job_is_read_or_refused(tmp_path: Path, changes: list[tuple[str, Any]]) -> None:
    job: dict[str, Any] = {}
    for path, value in changes:
        for section, keys in changed(path, value).items():
            both = isinstance(job.get(section), dict) and isinstance(keys, dict)
            job[section] = {**job[section], **keys} if both else keys
    with typed_errors():
        read = parse_job(job, "job.yaml", tmp_path)
        flat_keys(parse_job(read.model_dump(exclude_none=True)).model_dump())
        dump_job(read)


@bounded(60)
@given(st.dictionaries(st.sampled_from(["model", "data", "train", "lora"]) | KEYS, VALUES, max_size=4))
def test_any_mapping_is_read_or_refused(tmp_path: Path, job: Any) -> None:
    with typed_errors():
        parse_job(job, "job.yaml", tmp_path)


@bounded(120)
@given(st.builds("{}={}".format, PATHS | TEXTS | PATHS.map(lambda path: f"{path}.x"), TEXTS | LIKELY.map(str)))
def test_an_assignment_is_made_or_refused(tmp_path: Path, assignment: str) -> None:
    with typed_errors():
        parse_job(apply_overrides(WHOLE, [assignment]), "job.yaml", tmp_path)
