"""``veomni chat`` and ``veomni generate``: what was trained answers, as transformers lets it, and stops."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from post_training import EXAMPLES, needs_examples
from trained_runs import TrainedRun
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from veomni_core.cli.app import build_app
from veomni_core.errors import ConfigError
from veomni_trainer.job.load import load_job
from veomni_trainer.run.run_job import run_job

pytestmark = needs_examples
Go = Callable[..., bool]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned to answer, with its export."""
    folder = shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("chat") / "post_training")
    changes = ("train.output_dir=" + str(folder / "run"), "train.device=cpu", "train.steps=40", "train.export=true")
    run_job(load_job(folder / "sft.yaml", (*changes, "train.learning_rate=5e-3")))
    return folder / "run"


def veomni(*words: Any) -> Any:
    return CliRunner().invoke(build_app(), [str(word) for word in words])


def answer(*words: Any) -> dict[str, Any]:
    result = veomni(*words, "--json")
    assert result.exception is None, result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def by_transformers(folder: Path, question: str) -> str:
    """The likeliest answer by the model's own code and its own settings."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        found = model.generate(**ids, max_new_tokens=64, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_a_run_and_its_export_answer_as_transformers_lets_them_and_stop(trained: Path) -> None:
    wanted = by_transformers(trained / "model", "Capital of France?")
    of_run = answer("chat", trained, "--prompt", "Capital of France?", "--max-new-tokens", 64)
    of_export = answer("chat", trained / "model", "--prompt", "Capital of France?", "--max-new-tokens", 64)
    for found in (of_run, of_export):
        assert found["ended"] and found["text"] == wanted
        assert found["ends"] == [AutoTokenizer.from_pretrained(trained / "model").eos_token_id]
        assert "swiglu_mlp/standard:torch" in found["kernels"]
    assert Path(of_run["weights"]).name == "checkpoint-40" and of_export["weights"].endswith("model")
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    assert "it ended its answer to a text of the training after" in summary["export"]


@pytest.mark.thorough
def test_a_talk_streams_and_remembers_what_was_said(trained: Path) -> None:
    words = ["chat", str(trained), "--max-new-tokens", "16"]
    result = CliRunner().invoke(build_app(), words, input="Capital of France?\nCapital of Japan?\n\n")
    assert result.exception is None, result.exception
    assert "kernels: " in result.stderr and "ends at: '</s>'" in result.stderr
    first = answer("chat", trained, "--prompt", "Capital of France?")["text"]
    assert result.stdout.startswith(first)


@pytest.mark.thorough
def test_a_text_is_continued_with_kernels_as_without(trained: Path) -> None:
    words = ("generate", trained, "--prompt", "<|user|>Capital of Kenya?<|assistant|>")
    bound, eager = answer(*words), answer(*words, "--eager")
    assert bound["text"] == eager["text"] and bound["kernels"] and not eager["kernels"]
    assert answer(*words, "--max-new-tokens", 2)["tokens"] == 2


@pytest.mark.thorough
def test_a_model_of_bytes_continues_a_text(tmp_path: Path) -> None:
    made = TrainedRun.train(tmp_path)
    found = answer("generate", made.folder, "--prompt", "the quick ", "--max-new-tokens", 8)
    assert found["tokens"] == 8 and not found["ended"]
    with pytest.raises(ConfigError, match="no chat template; continue a text with veomni generate"):
        raise veomni("chat", made.folder, "--prompt", "hi").exception


@pytest.mark.thorough
def test_an_adapters_export_answers(here: Path, go: Go, trained: Path) -> None:
    changes = ("model.config=null", f"model.weights={trained / 'model'}", "data.tokenizer=null", "lora={rank: 4}")
    go("sft", *changes, "train.steps=2", "train.export=true")
    run, export = (
        answer("chat", folder, "--prompt", "Capital of Japan?") for folder in (here / "run", here / "run" / "model")
    )
    assert run["text"] == export["text"] and run["ended"] and export["ended"]
    assert run["ends"] == export["ends"]


@pytest.mark.thorough
def test_what_can_t_answer_is_refused(tmp_path: Path, here: Path, go: Go) -> None:
    go("classify", "train.steps=1")
    for folder, words in (
        (tmp_path / "none", "there is no such folder"),
        (tmp_path, "neither a complete checkpoint nor exported weights"),
        (here / "run", "Qwen3ForSequenceClassification, which scores texts and writes none"),
    ):
        error = veomni("generate", folder, "--prompt", "hi").exception
        assert isinstance(error, ConfigError) and words in str(error)
