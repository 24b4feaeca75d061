"""Reward models and classifiers: their heads, labels, adapters and exports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from post_training import needs_examples
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from veomni_core.errors import CheckpointError, ConfigError, JobFileError
from veomni_trainer.job.load import load_job
from veomni_trainer.run.dry_run import dry_run
from veomni_trainer.run.run_job import run_job
from veomni_trainer.setup.method_models import _in_order

pytestmark = needs_examples
Go = Callable[..., bool]


def texts(here: Path, *rows: tuple[object, object]) -> None:
    lines = (json.dumps({"text": text, "label": label}) for text, label in rows)
    (here / "labels" / "capitals.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def labels_of(folder: Path) -> list[str]:
    return list(json.loads((folder / "config.json").read_text(encoding="utf-8"))["id2label"].values())


def test_an_export_knows_the_labels_by_name(here: Path, go: Go) -> None:
    go("classify", "train.steps=25")
    folder = here / "run" / "model"
    assert labels_of(folder) == ["answer", "question"]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for text, label in (("Capital of Spain?", "question"), ("Madrid.", "answer")):
        with torch.no_grad():
            scores = model(**tokenizer(text, return_tensors="pt")).logits
        assert model.config.id2label[int(scores.argmax())] == label


@pytest.mark.thorough
def test_labels_are_the_jobs_the_datas_or_those_of_the_weights(here: Path, go: Go) -> None:
    few = ("train.steps=1", "train.save_every=1")
    texts(here, *((f"text {number}", number % 11) for number in range(12)))
    go("classify", *few)
    assert labels_of(here / "run" / "model") == [str(number) for number in range(11)], "in the order of numbers"
    texts(here, ("yes", True), ("no", False), ("y", True), ("n", False))
    go("classify", *few, "train.classify.labels=['true', maybe, 'false']", overwrite=True)
    assert labels_of(here / "run" / "model") == ["true", "maybe", "false"]
    (here / "run" / "model").rename(here / "weights")
    over = ("model.config=null", "model.weights=weights", "data.tokenizer=null")
    go("classify", *few, *over, overwrite=True)
    assert labels_of(here / "run" / "model") == ["true", "maybe", "false"], "the weights' own order"
    texts(here, ("yes", "certainly"), ("no", "false"), ("y", "true"), ("n", "false"))
    with pytest.raises(JobFileError, match="label 'certainly' in column 'label' is none of .*: true, maybe, false"):
        go("classify", *few, *over, overwrite=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")], "all rows have the label 'x'"),
        ([("a", "x"), ("b", None), ("c", "y"), ("d", "x")], "line 2: column 'label' must be a label"),
        ([("a", "x"), ("b", 1.5), ("c", "y"), ("d", "x")], "line 2: column 'label' must be a label"),
        ([("a", "x"), ("", "y"), ("c", "y"), ("d", "x")], "line 2: column 'text' is empty"),
        ([("a", "x"), (["b"], "y"), ("c", "y"), ("d", "x")], "line 2: column 'text' must be text"),
    ],
)
def test_labels_that_can_t_be_learned(here: Path, go: Go, rows: list[tuple[object, object]], words: str) -> None:
    texts(here, *rows)
    with pytest.raises(JobFileError, match=words):
        go("classify", "train.steps=1")


@pytest.mark.thorough
def test_longer_texts_are_counted_and_longer_pairs_refused(
    here: Path, go: Go, capsys: pytest.CaptureFixture[str]
) -> None:
    go("classify", "train.steps=1", "data.sequence_length=8")
    assert re.search(r"warning: 1\d texts are longer than data\.sequence_length 8", capsys.readouterr().out)
    with pytest.raises(JobFileError, match=r"pair 1 has \d+ tokens, and data.sequence_length is 40; raise it"):
        go("reward", "train.steps=1", "data.sequence_length=40", overwrite=True)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["reward", "classify"])
def test_a_language_model_gets_a_head_which_adapters_train_and_merges_keep(here: Path, go: Go, method: str) -> None:
    go("sft", "train.steps=1", "train.export=true")
    (here / "run" / "model").rename(here / "weights")
    over = ("model.config=null", "model.weights=weights", "data.tokenizer=null")
    go(method, *over, "train.steps=2", overwrite=True)
    whole = json.loads((here / "run" / "summary.json").read_text(encoding="utf-8"))["export"]
    adapter = ("lora={rank: 4}", "train.steps=3", "train.export=merged", "train.save_every=2")
    go(method, *over, *adapter, overwrite=True)
    merged = json.loads((here / "run" / "summary.json").read_text(encoding="utf-8"))["export"]
    assert all("the same logits as the trained model's" in said for said in (whole, merged))
    labels = ["reward"] if method == "reward" else ["answer", "question"]
    assert labels_of(here / "run" / "model") == labels
    before = (here / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    go(method, *over, *adapter, "train.steps=4", resume=True)
    after = (here / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert after.startswith(before.splitlines()[0]) and len(after.splitlines()) == 4


@pytest.mark.thorough
def test_a_classifiers_weights_without_their_head_are_damaged(here: Path, go: Go) -> None:
    from safetensors.torch import load_file, save_file

    go("classify", "train.steps=1")
    folder = (here / "run" / "model").rename(here / "weights")
    kept = {name: each for name, each in load_file(folder / "model.safetensors").items() if "score" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"does not fit this model: missing keys: score\.weight"):
        go("classify", "model.config=null", "model.weights=weights", "data.tokenizer=null", overwrite=True)


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        (["1", "01", "2"], ["01", "1", "2"]),
        (["--1", "1"], ["--1", "1"]),
        (["0", "-0"], ["-0", "0"]),
        (["10", "-9", "9"], ["-9", "9", "10"]),
        (["9" * 5000, "1"], ["1", "9" * 5000]),
        (["²", "1"], ["1", "²"]),
    ],
)
def test_labels_have_one_order(labels: list[str], order: list[str]) -> None:
    assert _in_order(labels) == _in_order(labels[::-1]) == order


@pytest.mark.parametrize(
    ("method", "labels", "words"),
    [
        ("classify", ["question", "answer"], "the job names question, answer, and .* 2 labels: answer, question"),
        ("classify", ["answer", "question", "other"], "the job names answer, question, other, and .* 2 labels"),
        ("reward", None, "reward trains one score, and .* is a classifier of 2 labels: answer, question"),
    ],
)
def test_weights_with_scores_of_other_labels_are_refused(
    here: Path, method: str, labels: list[str] | None, words: str
) -> None:
    job = load_job(here / f"{method}.yaml", ["train.device=cpu"])
    config = {**job.model.config, "architectures": ["Qwen3ForSequenceClassification"], "vocab_size": 512}  # type: ignore[dict-item]
    config["id2label"] = {0: "answer", 1: "question"}
    (here / "weights").mkdir()
    (here / "weights" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    changes = ["model.config=null", "model.weights=weights", f"train.output_dir={here / 'run'}", "train.device=cpu"]
    job = load_job(here / f"{method}.yaml", [*changes, *([f"train.classify.labels={labels}"] if labels else [])])
    for start in (dry_run, run_job):
        with pytest.raises(ConfigError, match=words):
            start(job)


@pytest.mark.thorough
def test_a_pair_is_two_sequences_of_memory(here: Path) -> None:
    kept = {}
    for method, batch in (("reward", 4), ("classify", 4), ("classify", 8)):
        changes = (f"train.output_dir={here / 'run'}", "train.device=cpu", f"train.batch_size={batch}")
        memory = dry_run(load_job(here / f"{method}.yaml", changes)).memory
        assert memory is not None
        kept[method, batch] = memory.activations
    assert kept["reward", 4] == pytest.approx(kept["classify", 8], rel=0.02)
    assert kept["reward", 4] > 1.9 * kept["classify", 4]


def test_what_has_no_head_for_words_is_sent_to_the_methods_for_scores(here: Path, go: Go) -> None:
    config = "model.config={model_type: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    with pytest.raises(ConfigError, match=r"write train\.method: reward or classify"):
        go("sft", f"{config[:-1]}, architectures: [BertForMaskedLM]}}")
    with pytest.raises(ConfigError, match="transformers has none of model_type bark"):
        go("classify", "model.config={model_type: bark}")
    with pytest.raises(ConfigError, match="without a decoder of its own, and transformers has none of model_type t5"):
        go("reward", "model.config={model_type: t5, d_model: 32, d_ff: 32, num_layers: 1, num_heads: 2}")
