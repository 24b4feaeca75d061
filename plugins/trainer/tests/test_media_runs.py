"""What comes out of a job on pictures: checkpoints and exports that have its processor, answers, and a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_media_mistakes import GOOD, chat, job_on, part
from tiny_configs import LLAMA
from tiny_processors import media_folder, picture
from transformers import AutoProcessor

from veomni_core.errors import ConfigError, JobFileError
from veomni_trainer.output.export import export_checkpoint

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]
CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a tiny Gemma 3, as they are on the Hub: its processor's template is in a file of its own."""
    folder = media_folder("gemma3", tmp_path_factory.mktemp("gemma3"))
    template = folder / "chat_template.jinja"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}), encoding="utf-8")
    template.write_text("{{ messages[0].content }} is what the tokenizer's own says")
    return folder


@pytest.fixture
def pictures(tmp_path: Path, job_data: dict[str, Any], gemma: Path) -> dict[str, Any]:
    """A job on rows with pictures."""
    for colour in ("red", "green", "blue"):
        picture(colour).save(tmp_path / f"{colour}.png")
    rows = [chat("<image> What is it?", colour, images=[f"{colour}.png"]) for colour in ("red", "green", "blue")]
    job_on([*rows, chat("Say 3.", "3")], job_data, tmp_path, gemma)
    job_data["train"] |= {"steps": 2, "learning_rate": 0.01, "save_every": 1}
    return job_data


def same_processor(folder: Path, job: Path) -> None:
    """Fails unless the processor in ``folder`` is that of ``job``, and makes the same of a picture."""
    here, there = AutoProcessor.from_pretrained(folder), AutoProcessor.from_pretrained(job)
    assert type(here) is type(there) and here.to_dict() == there.to_dict()
    assert here.tokenizer.get_vocab() == there.tokenizer.get_vocab()
    text = there.apply_chat_template(CHAT, add_generation_prompt=True)
    assert "own says" not in text and here.apply_chat_template(CHAT, add_generation_prompt=True) == text
    made, expected = (each(text=[text], images=[[picture("red", 40)]], return_tensors="pt") for each in (here, there))
    assert made.keys() == expected.keys() and all(torch.equal(made[name], expected[name]) for name in expected)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "adapter"])
def test_checkpoints_and_exports_have_the_processor_of_the_job(
    pictures: dict[str, Any], train: Train, run: Path, gemma: Path, lora: Any
) -> None:
    pictures["lora"] = lora
    train(pictures, "train.export=merged" if lora else "train.export=true")
    export_checkpoint(run / "checkpoint-1", run / "alone")
    for name in ("checkpoint-1", "checkpoint-2", "model", "alone"):
        same_processor(run / name, gemma)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model", ["Gemma3ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize(
    ("row", "columns", "what"),
    [
        (GOOD, None, "line 1: column 'images' is not empty, and"),
        (part(path="red.png"), None, "line 1: turn 1 has a part of type 'image';"),
        (chat("<image>", seen=["red.png"]), {"messages": "messages", "images": "seen"}, "has 'seen', and"),
    ],
    ids=["a column", "a part", "a named column"],
)
def test_pictures_for_a_model_without_a_tower_are_refused(
    pictures: dict[str, Any], train: Train, gemma: Path, tmp_path: Path, model: str, row: Any, columns: Any, what: str
) -> None:
    job_on([row, row], pictures, tmp_path, gemma, columns=columns)
    config = json.loads((gemma / "config.json").read_text(encoding="utf-8")) | {"architectures": [model]}
    llama = {**LLAMA, "vocab_size": 384, "max_position_embeddings": 256}
    pictures["model"]["config"] = config if model.startswith("Gemma") else llama
    pictures["model"]["weights"], pictures["data"]["tokenizer"] = None, str(gemma)
    with pytest.raises(JobFileError, match=rf"rows\.jsonl,? {what} {model} takes text alone; train a model"):
        train(pictures)
    with pytest.raises(ConfigError, match=rf"data\.image_pixels: {model} takes no images"):
        train(pictures, "data.image_pixels={max: 1024}")
