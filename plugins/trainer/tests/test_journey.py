"""From a model of the Hub and a file to an answer: two processes, an adapter, killed twice, resumed, merged, asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
import torch
import yaml
from hub_caches import HubCache, run_offline
from huggingface_hub import constants
from small_tokenizers import byte_level
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

from forked_processes import Forked, finish, fork_ranks
from veomni_core.cli.app import build_app

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers shards models since 5.21")
pytestmark = pytest.mark.thorough

STEPS, MODEL = 12, "acme/tiny"
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Italy": "Rome", "Cuba": "Havana"}
QUESTIONS = {f"Capital of {country}?": f"{city}." for country, city in CAPITALS.items()}
WRONG = "I don't know."


def _alpaca(folder: Path) -> str:
    rows = [{"instruction": asked, "input": "", "output": said} for asked, said in QUESTIONS.items()]
    (folder / "alpaca.json").write_text(json.dumps(rows), encoding="utf-8")
    return "alpaca.json"


def _pairs(folder: Path) -> str:
    rows = [{"prompt": asked, "chosen": said, "rejected": WRONG} for asked, said in QUESTIONS.items()]
    (folder / "pairs.json").write_text(json.dumps(rows), encoding="utf-8")
    return "pairs.json"


def _verdicts(folder: Path) -> str:
    rows = [
        {"prompt": asked, "completion": completion, "label": completion == said}
        for asked, said in QUESTIONS.items()
        for completion in (said, WRONG)
    ]
    (folder / "verdicts.json").write_text(json.dumps(rows), encoding="utf-8")
    return "verdicts.json"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub with a tiny model, its tokenizer and chat template; nothing else can be reached."""
    tokenizer, content = byte_level(), tmp_path / "content"
    config = Qwen3Config(
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer), "tie_word_embeddings": True},
        **{"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(content)
    tokenizer.save_pretrained(content)
    HubCache(tmp_path / "hub").add(MODEL, content)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


class Journey:
    """A job of one method, and what is made of it."""

    def __init__(self, folder: Path, cache: Path, files: str, **train: Any) -> None:
        self.folder, self._cache = folder, cache
        more = {"steps": STEPS, "batch_size": 2, "learning_rate": 1e-2, "save_every": 2, "device": "cpu"}
        job = {
            "model": {"weights": MODEL, "ops_implementation": {"preset": "auto"}},
            "data": {"files": files, "sequence_length": 96},
            "train": {"output_dir": str(folder / "run"), **more, **train},
            "lora": {"rank": 8, "alpha": 16},
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")

    def start(self, run: str, *more: str) -> list[Forked]:
        words = ("train", str(self.folder / "job.yaml"), "--set", f"train.output_dir={self.folder / run}", *more)
        return fork_ranks(run_offline, str(self._cache), *words, processes=2)

    def finish(self, run: str, *more: str) -> list[dict[str, Any]]:
        ranks = finish(self.start(run, *more), timeout=200)
        assert not any(each.returncode for each in ranks), ranks[0].stderr[-4000:] + ranks[1].stderr[-4000:]
        return self.rows(run)

    def rows(self, run: str) -> list[dict[str, Any]]:
        metrics = self.folder / run / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def kill(self, run: str, when: Callable[[], bool], *more: str) -> None:
        """Start it, and kill both processes while ``when`` is so: they stand still while it is looked at."""
        ranks, until = self.start(run, *more), time.monotonic() + 100
        while all(each.is_running() for each in ranks) and time.monotonic() < until:
            if when():
                for each in ranks:
                    each.send_signal(SIGSTOP)
                if when():
                    break
                for each in ranks:
                    each.send_signal(SIGCONT)
            time.sleep(0.001)
        ended = [each.end() for each in ranks]
        assert [each.returncode for each in ended] == [-9, -9], ended[0].stderr[-4000:]

    def go(self, kill_after: int) -> None:
        """Train it whole, and killed twice and resumed: at a step, and in a save. Both have the same curves."""
        whole = self.finish("whole")
        self.kill("run", lambda: len(self.rows("run")) >= kill_after)
        in_a_save = (self.folder / "run" / ".incomplete").exists
        self.kill("run", lambda: in_a_save() and len(self.rows("run")) > kill_after, "--resume")
        assert [len(rows) for rows in (whole, self.finish("run", "--resume"))] == [STEPS, STEPS]
        for one, other in zip(whole, self.rows("run"), strict=True):
            assert [one[key] for key in ("step", "loss", "grad_norm")] == [
                other[key] for key in ("step", "loss", "grad_norm")
            ]
        assert whole[-1]["loss"] < whole[0]["loss"]

    def merged(self) -> Path:
        self.veomni("export", self.folder / "run", self.folder / "merged", "--merge")
        return self.folder / "merged"

    def answer(self, verb: str, folder: Path, prompt: str) -> str:
        said = json.loads(self.veomni(verb, folder, "--prompt", prompt, "--max-new-tokens", 8, "--json"))
        text: str = said["text"]
        return text

    def veomni(self, *words: Any) -> str:
        result = CliRunner().invoke(build_app(), [str(word) for word in words])
        assert result.exception is None, result.exception
        return result.stdout


@pytest.mark.parametrize(
    ("files", "kill_after", "train"),
    [
        pytest.param(_alpaca, 5, {"method": "sft", "fsdp_size": 2}, id="sft"),
        pytest.param(_verdicts, 3, {"method": "kto"}, id="kto"),
    ],
)
def test_a_model_that_talks(
    tmp_path: Path, cache: Path, files: Callable[[Path], str], kill_after: int, train: dict[str, Any]
) -> None:
    journey = Journey(tmp_path, cache, files(tmp_path), **train)
    journey.go(kill_after)
    merged = journey.merged()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    question = next(iter(QUESTIONS))
    turns = [{"role": "user", "content": question}]
    prompt: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    said = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    wanted = tokenizer.decode(said, skip_special_tokens=True)
    for folder in (tmp_path / "run", merged):
        assert journey.answer("chat", folder, question) == wanted
        assert journey.answer("generate", folder, prompt) == wanted


def test_a_reward_model(tmp_path: Path, cache: Path) -> None:
    journey = Journey(tmp_path, cache, _pairs(tmp_path), method="reward")
    journey.go(kill_after=4)
    merged = journey.merged()
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)

    def score(asked: str, said: str) -> float:
        return float(model(**tokenizer(asked + said, return_tensors="pt", return_token_type_ids=False)).logits)

    assert all(score(asked, said) > score(asked, WRONG) for asked, said in QUESTIONS.items())
