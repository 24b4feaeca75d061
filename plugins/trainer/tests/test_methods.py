"""``train.method``: the jobs of ``examples/post_training``, with kernels and without, resumed, and adapted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_eager import veomni_and_eager
from post_training import EXAMPLES, needs_examples
from transformers import TrainingArguments
from typer.testing import CliRunner

from forked_processes import veomni_on_ranks
from veomni_core.cli.app import build_app
from veomni_core.errors import CheckpointError, ConfigError
from veomni_trainer.job.load import load_job
from veomni_trainer.run.dry_run import dry_run
from veomni_trainer.run.run_job import run_job
from veomni_trainer.setup.arguments import training_arguments
from veomni_trainer.setup.trl_arguments import trl_config

pytestmark = needs_examples

CURVES = {
    "sft": {"Entropy", "Token accuracy"},
    "dpo": {"Pairs the right way round", "Reward margin", "Log-probability of the rejected", "Entropy"},
    "grpo": {"Reward", "Reward spread", "Completion length", "Reward of brevity", "Reward of contains_answer"},
    "kto": {"Reward of the chosen", "Reward margin", "Divergence from the reference", "Entropy"},
    "orpo": {"Reward margin", "Loss of the chosen", "Log odds ratio"},
    "rloo": {"Reward", "Divergence from the reference", "Completion length", "Reward of brevity"},
    "reward": {"Accuracy", "Margin", "Mean score"},
    "classify": {"Accuracy"},
}
METHODS = tuple(CURVES)
SHOWN = {  # what the progress shows of each
    **{"sft": "token accuracy", "dpo": "margin", "kto": "KL", "orpo": "margin", "grpo": "reward", "rloo": "KL"},
    **{"reward": "margin", "classify": "accuracy"},
}
OF_LOGPROBS = ("sft", "dpo", "kto", "grpo", "rloo")  # the methods whose loss runs on a kernel for them
PAGE = EXAMPLES.parents[1] / "docs" / "how-to" / "post-train.md"
Go = Callable[..., bool]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def learned(run: Path) -> list[dict[str, float]]:
    """The rows without what depends on the machine."""
    measured = ("step_seconds", "tokens_per_second", "tokens_per_second_each", "peak_memory_bytes")
    return [{name: value for name, value in row.items() if name not in measured} for row in rows_of(run)]


def assert_close(found: list[dict[str, float]], wanted: list[dict[str, float]], relative: float = 1e-4) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=relative, abs=1e-5)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("method", METHODS)
def test_an_example_job_trains_and_reports_its_curves(
    here: Path, go: Go, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    go(method)
    (line,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("step 1/"))
    assert f"  {SHOWN[method]} " in line
    rows, report = rows_of(here / "run"), (here / "run" / "report.html").read_text(encoding="utf-8")
    assert len(rows) == load_job(here / f"{method}.yaml").train.steps
    assert [title for title in CURVES[method] if f">{title}<" not in report] == []
    receipt = json.loads((here / "run" / "receipt.json").read_text(encoding="utf-8"))
    kernels = {kernel["kernel"] for kernel in receipt["kernels"]}
    assert ("token_logprobs/causal:chunk_logprobs" in kernels) == (method in OF_LOGPROBS)
    if method in ("sft", "kto", "orpo"):
        assert rows[-1]["loss"] < rows[0]["loss"]
    elif method in ("reward", "classify"):
        assert rows[-1]["accuracy"] == 1.0 and rows[-1]["loss"] < 0.1
        summary = json.loads((here / "run" / "summary.json").read_text(encoding="utf-8"))
        assert "the same logits as the trained model's" in summary["export"]
    elif method == "dpo":
        assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: the model is its reference
        assert rows[-1]["rewards/margins"] > 0.5
    else:
        assert {"rewards/contains_answer/mean", "rewards/brevity/mean", "completions/mean_length"} <= rows[0].keys()


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_kernels_learn_the_same_as_the_models_own_code(here: Path, go: Go, method: str) -> None:
    # Plain descent: Adam's first steps divide gradients by their own size, and so enlarge rounding.
    few = ("train.steps=4", "train.optimizer=sgd", "train.learning_rate=0.05")
    go(method, *few)
    bound = learned(here / "run")
    go(method, *few, "model.ops_implementation={preset: eager}", overwrite=True)
    eager = learned(here / "run")
    if method in ("dpo", "kto"):  # of two equal models, rounding decides the sign of the first margins
        for rows in (bound, eager):
            rows[0].pop("rewards/accuracies", None)
    assert_close(bound, eager)


@pytest.mark.thorough
def test_a_comparison_with_eager_shows_both_curves(here: Path) -> None:
    changes = (f"train.output_dir={here / 'run'}", "train.device=cpu", "train.steps=3")
    sets = [part for change in changes for part in ("--set", change)]
    result = veomni_and_eager("train", here / "dpo.yaml", "--compare", "eager-after", *sets)
    assert result.returncode == 0, result.stderr
    report = (here / "run" / "report.html").read_text(encoding="utf-8")
    assert "Reward margin" in report and "eager" in report
    assert_close(learned(here / "run")[1:], learned(here / "run" / "eager")[1:], 1e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_goes_on_exactly(here: Path, go: Go, method: str) -> None:
    changes = ("train.steps=4", "train.save_every=2", "train.keep_checkpoints=9")
    go(method, *changes)
    whole = learned(here / "run")
    shutil.rmtree(here / "run" / "checkpoint-4")
    go(method, *changes, resume=True)
    assert learned(here / "run") == whole


@pytest.mark.thorough
def test_a_policy_that_is_held_to_its_start(here: Path, go: Go) -> None:
    changes = ("train.steps=4", "train.grpo.beta=0.1", "train.save_every=2", "train.keep_checkpoints=9")
    go("grpo", *changes)
    whole = learned(here / "run")
    assert whole[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert whole[-1]["kl"] > 1e-6
    shutil.rmtree(here / "run" / "checkpoint-4")
    go("grpo", *changes, resume=True)
    assert learned(here / "run") == whole


@pytest.fixture(scope="module")
def trained_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the model of the examples."""
    folder = shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("weights") / "post_training")
    changes = (f"train.output_dir={folder / 'run'}", "train.device=cpu", "train.steps=1", "train.save_every=1")
    run_job(load_job(folder / "sft.yaml", changes))
    return folder / "run" / "checkpoint-1"


@pytest.fixture
def over_weights(here: Path, trained_weights: Path) -> tuple[str, ...]:
    """Changes of a job for it to begin with weights that lie beside it."""
    shutil.copytree(trained_weights, here / "weights")
    return "model.config=null", "model.weights=weights", "data.tokenizer=null"


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_whose_reference_is_the_model_without_it(
    here: Path, go: Go, over_weights: tuple[str, ...], method: str
) -> None:
    changes = (*over_weights, "lora={rank: 4}", "train.steps=4", "train.save_every=2", "train.keep_checkpoints=9")
    go(method, *changes)
    whole = learned(here / "run")
    saved = here / "run" / "checkpoint-2"
    assert not (saved / "ref").exists()
    shutil.rmtree(here / "run" / "checkpoint-4")
    go(method, *changes, resume=True)
    assert learned(here / "run") == whole


@pytest.mark.thorough
def test_an_adapter_of_the_head_would_not_be_trained(go: Go, over_weights: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="reads the output projection's weight past its adapter"):
        go("dpo", *over_weights, "lora={target_modules: [lm_head]}")


@pytest.mark.thorough
def test_one_method_does_not_go_on_from_anothers_run(here: Path, go: Go) -> None:
    go("sft", "train.steps=2", "train.save_every=2")
    with pytest.raises((CheckpointError, ConfigError), match=r"train\.method"):
        go("sft", "train.method=pretrain", "train.steps=3", resume=True)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("method", ["dpo", "classify"])
@pytest.mark.parametrize("change", ["data.sequence_length=64", "data.chat_template=other.jinja"])
def test_a_run_does_not_go_on_with_other_tokens(here: Path, go: Go, method: str, change: str) -> None:
    (here / "other.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}", encoding="utf-8"
    )
    always = ("train.steps=1", "train.save_every=1", "train.export=false")
    go(method, *always)
    changes = (f"train.output_dir={here / 'run'}", "train.device=cpu", *always, change, "train.steps=2")
    for start in (run_job, dry_run):
        with pytest.raises(CheckpointError, match="was trained on other tokens of the same rows"):
            start(load_job(here / f"{method}.yaml", changes), resume=True)


@pytest.mark.thorough
def test_each_row_is_compared_before_a_run_goes_on(here: Path, go: Go) -> None:
    rows = "".join(f'{{"text": "text {number}", "label": "{number % 2}"}}\n' for number in range(130))
    (here / "rows.jsonl").write_text(rows, encoding="utf-8")
    always = ("data.files=rows.jsonl", "train.save_every=1", "train.export=false")
    go("classify", "train.steps=1", *always)
    (here / "rows.jsonl").write_text(rows.replace('text 3"', 'text X"'), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"on other sequences than this job's \(130 then, 130 now\)"):
        go("classify", "train.steps=2", *always, resume=True)


def test_a_run_does_not_go_on_with_an_edited_reward(here: Path, go: Go) -> None:
    always = ("train.save_every=1", "train.grpo.max_completion_length=2")
    go("grpo", "train.steps=1", *always)
    edited = (here / "rewards.py").read_text(encoding="utf-8").replace("/ 16", "/ 8")
    (here / "rewards.py").write_text(edited, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"other rewards: the file of contains_answer, brevity was edited"):
        go("grpo", "train.steps=2", *always, resume=True)


def plan_of(job: Path, *changes: str) -> dict[str, Any]:
    sets = [part for change in changes for part in ("--set", change)]
    result = CliRunner().invoke(build_app(), ["plan", str(job), "--json", *sets])
    assert result.exception is None, result.exception
    planned: dict[str, Any] = json.loads(result.stdout)
    return planned


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_the_plan_is_that_of_the_training(here: Path, go: Go, method: str) -> None:
    specs = [kernel["spec"] for kernel in plan_of(here / f"{method}.yaml", "train.device=cpu")["kernels"]]
    go(method, "train.steps=1")
    receipt = json.loads((here / "run" / "receipt.json").read_text(encoding="utf-8"))
    planned = {f"{spec['op_name']}/{spec['variant']}:{spec['name']}" for spec in specs}
    assert {kernel["kernel"] for kernel in receipt["kernels"]} == planned


def on_two(here: Path, method: str, *changes: str) -> list[dict[str, float]]:
    """What a job of two processes has learned."""
    sets = [part for change in (f"train.output_dir={here / 'run'}", *changes) for part in ("--set", change)]
    for rank in veomni_on_ranks("train", here / f"{method}.yaml", "--overwrite", *sets, processes=2):
        assert rank.returncode == 0, rank.stderr
    return learned(here / "run")


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_two_processes_train_as_one(here: Path, go: Go, method: str) -> None:
    few = ("train.steps=3", "train.optimizer=sgd", "train.device=cpu")
    go(method, *few)
    alone = learned(here / "run")
    together = on_two(here, method, *few, "train.batch_size=2")
    for found, wanted in zip(together, alone, strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-3, abs=1e-5), key


@pytest.mark.thorough
def test_two_processes_draw_the_same_with_kernels_and_without(here: Path) -> None:
    few = ("train.steps=2", "train.optimizer=sgd", "train.batch_size=4", "train.device=cpu")
    bound = on_two(here, "grpo", *few)
    assert_close(bound, on_two(here, "grpo", *few, "model.ops_implementation={preset: eager}"))


@pytest.mark.docs
def test_the_jobs_of_the_page_train(here: Path, over_weights: tuple[str, ...]) -> None:
    """docs/how-to/post-train.md, with lengths for a test."""
    blocks = re.findall(r"```(yaml|python)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    jobs = [text for language, text in blocks if language == "yaml"]
    (reward,) = [text for language, text in blocks if language == "python"]
    with (here / "rewards.py").open("a", encoding="utf-8") as file:
        file.write(reward)
    short = {"dpo": (), "grpo": ("train.grpo.max_completion_length=8",), "classify": ()}
    methods = []
    for text in jobs:
        method = yaml.safe_load(text)["train"]["method"]
        methods.append(method)
        (here / "page.yaml").write_text(text, encoding="utf-8")
        few = ("model.weights=weights", "train.steps=1", "train.device=cpu", "train.precision=float32")
        settings = (*few, "data.sequence_length=96", f"train.output_dir={here / method}", *short[method])
        run_job(load_job(here / "page.yaml", settings))
        assert len(rows_of(here / method)) == 1
    assert methods == ["dpo", "grpo", "classify"]


@pytest.mark.parametrize("method", METHODS)
def test_checkpointing_is_as_the_job_says_in_the_words_of_this_transformers(method, tmp_path, recwarn):
    for wanted in (False, True):
        train = load_job(EXAMPLES / f"{method}.yaml", [f"train.gradient_checkpointing={wanted}"]).train
        kind, more = trl_config(train, 64) if train.uses_trl else (TrainingArguments, {})
        assert training_arguments(train, tmp_path, kind, **more).gradient_checkpointing is wanted
    assert not [each for each in recwarn if issubclass(each.category, FutureWarning)]
