"""A job on rows with media computes what transformers' ``Trainer`` computes that is set up by hand: the same losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from test_equals_transformers import ARGUMENTS
from test_equals_trl import watched
from tiny_processors import COLOURS, FAMILIES, OMNI, media_folder, needs_torchvision, picture
from transformers import AutoProcessor, Trainer, TrainingArguments, set_seed
from trl import SFTConfig, SFTTrainer

from veomni_core.errors import ConfigError
from veomni_transformers.build import load_as_trained

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]
STEPS = 30
SFT = {
    "gradient_accumulation_steps": 2,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": None,
    "dataset_kwargs": {"skip_prepare_dataset": True},
}
ONE_IMAGE = ("paligemma", "mllama")  # whose processors take rows with as many images each


def wave(hertz: float, seconds: float, rate: int = 16_000) -> np.ndarray[Any, Any]:
    """A tone, as 16 bits hold it."""
    tone = np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)
    return (tone * 2**14).astype(np.int16).astype(np.float32) / 2**15


def chats_of(kind: str) -> list[dict[str, Any]]:
    """Ten conversations as transformers takes them; every third has no media, and the seventh has two."""
    rows = []
    for number in range(10):
        count = 0 if number % 3 == 2 else 2 if number == 6 else 1
        colours = [[*COLOURS][(number + each) % 4] for each in range(count)]
        asked: list[dict[str, Any]] = []
        for place, colour in enumerate(colours):
            image = picture(colour, 16 + 8 * (number % 2))
            sound = wave(200.0 * (1 + [*COLOURS].index(colour)), 0.6 + 0.04 * number)
            asked += [{"type": kind, kind: image if kind == "image" else sound}]
            asked += [{"type": "text", "text": f" is {place}."}] if count > 1 else []
        asked.append({"type": "text", "text": "What is it?" if count else f"Say {number}."})
        answer = " and ".join(colours) or str(number)
        rows.append([{"role": "user", "content": asked}, {"role": "assistant", "content": [_text(answer)]}])
    return [{"chat": row} for row in rows]


def _text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def write_rows(rows: list[dict[str, Any]], kind: str, folder: Path) -> None:
    """The same rows with placeholders and a column of files, as LLaMA-Factory and ms-swift write them."""
    (folder / "media").mkdir()
    lines = []
    for number, row in enumerate(rows):
        names, turns = [], []
        for turn in row["chat"]:
            words = ""
            for part in turn["content"]:
                if part["type"] == "text":
                    words += part["text"]
                    continue
                words += f"<{kind}>"
                names.append(f"media/{number}-{len(names)}.{'png' if kind == 'image' else 'wav'}")
                if kind == "image":
                    part[kind].save(folder / names[-1])
                else:
                    import soundfile

                    soundfile.write(folder / names[-1], part[kind], 16_000, subtype="PCM_16")
            turns.append({"role": turn["role"], "content": words})
        lines.append(json.dumps({"messages": turns, f"{kind}s": names}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


def by_hand(rows: list[dict[str, Any]], folder: Path, out: Path, method: str) -> list[float]:
    """The losses of transformers' ``Trainer``, or TRL's, and its processor's own masks of what the assistant says."""
    processor = AutoProcessor.from_pretrained(folder)

    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        found = processor.apply_chat_template(
            [each["chat"] for each in examples],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            processor_kwargs={"padding": True, "padding_side": "right", "add_special_tokens": False},
        ).convert_to_tensors("pt")  # afterwards: InternVL's would make a tensor of the places of placeholders
        learned = found.pop("assistant_masks").bool()
        if model.config.model_type == "paligemma":  # whose processor says that all is learned, the image too
            learned = found["attention_mask"].bool() & (found["input_ids"] != model.config.image_token_id)
        labels = found["input_ids"].masked_fill(~learned, -100)
        return {**found, "labels": labels}

    set_seed(0)
    model = load_as_trained(folder)
    model.set_attn_implementation("eager")
    arguments = ARGUMENTS | {"max_steps": STEPS, "remove_unused_columns": False}
    found: list[float] = []
    if method == "sft":
        arguments |= SFT
        first = Dataset.from_list([{"input_ids": [1], "labels": [1]}])  # TRL asks for a dataset, and looks at one row
        hand: Any = watched(SFTTrainer, found)(
            model, SFTConfig(str(out), **arguments), collate, first, processing_class=processor
        )
        hand.train_dataset = rows
    else:
        hand = watched(Trainer, found)(model, TrainingArguments(str(out), **arguments), collate, rows)
    hand.model_accepts_loss_kwargs = method == "sft"  # some families say no, and divide by what is given all the same
    hand.train()
    return found


def _media_in(row: dict[str, Any]) -> int:
    return sum(part["type"] != "text" for turn in row["chat"] for part in turn["content"])


OFTEN = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "internvl", "qwen2_audio")
KINDS = [
    *((each, "audio" if each == "qwen2_audio" else "image") for each in FAMILIES),
    *((each, "audio") for each in OMNI),
]
CASES = [
    needs_torchvision(
        *(each, kind, method),
        marks=[] if each in OFTEN and method == "pretrain" else [pytest.mark.thorough],
    )
    for each, kind in KINDS
    for method in ("pretrain", "sft")
]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(("model_type", "kind", "method"), CASES)
def test_a_job_on_media_has_the_losses_of_a_trainer_by_hand(
    job_data: dict[str, Any],
    train: Train,
    losses: Losses,
    run: Path,
    tmp_path: Path,
    model_type: str,
    kind: str,
    method: str,
) -> None:
    if kind == "audio":
        pytest.importorskip("soundfile")
        pytest.importorskip("soxr")
    folder = media_folder(model_type, tmp_path / "base")
    rows = [row for row in chats_of(kind) if model_type not in ONE_IMAGE or _media_in(row) == 1]
    write_rows(rows, kind, tmp_path)
    job_data["model"] = {"weights": str(folder), "ops_implementation": {"preset": "eager"}}
    job_data["data"] = {"files": "rows.jsonl", "sequence_length": 200}
    job_data["train"] |= {"steps": STEPS, "method": method, "save_every": "never"}
    if model_type == "paligemma":
        with pytest.raises(ConfigError, match="PaliGemmaProcessor writes text of its own into a chat"):
            train(job_data)
        job_data["data"]["loss_on"] = "all"
    job_data["train"] |= {"gradient_accumulation": 2} if method == "sft" else {}
    train(job_data)
    expected = by_hand(rows, folder, tmp_path / "hand", method)
    assert expected[-1] < expected[0]
    assert [loss for _, loss in losses(run)] == pytest.approx(expected, rel=1e-5)
