"""Methods of TRL's on prompts with images: the losses of TRL's trainer that is set up by hand, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, Json, List
from safetensors.torch import load_file
from test_equals_trl import ARGUMENTS, TRAINERS, watched
from tiny_processors import COLOURS, media_folder, needs_torchvision, picture
from transformers import AutoProcessor, set_seed

from veomni_core.errors import JobFileError
from veomni_transformers.build import load_as_trained

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]
STEPS = 30
METHODS = ("dpo", "kto", "grpo", "rloo")
REWARD = """
def length(completions, **columns):
    return [float(len(turns[-1]["content"])) for turns in completions]
"""


def rows_of(method: str) -> list[dict[str, Any]]:
    """Twelve rows, by the columns of the method; of pairs every third has no image, and the seventh has two."""
    rows = []
    for number in range(12):
        count = 0 if number % 3 == 2 else 2 if number == 6 else 1
        count = 1 if method in ("grpo", "rloo") else count
        colours = [[*COLOURS][(number + each) % 4] for each in range(count)]
        words = [{"type": "image"} for _ in colours] + [{"type": "text", "text": "What is it?"}]
        answer, other = " and ".join(colours) or str(number), "grey"
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": words}]}
        if method == "dpo":
            row |= {"chosen": _said(answer), "rejected": _said(other)}
        elif method == "kto":
            row |= {"completion": _said(other if number % 2 else answer), "label": number % 2 == 0}
        rows.append({**row, "images": [picture(colour, 16 + 8 * (number % 2)) for colour in colours]})
    return rows


def _said(words: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": words}]


def write_rows(rows: list[dict[str, Any]], folder: Path) -> None:
    """The same rows with placeholders in their words, and files in the column ``images``."""
    lines = []
    for number, row in enumerate(rows):
        names = [f"{number}-{each}.png" for each in range(len(row["images"]))]
        for image, name in zip(row["images"], names, strict=True):
            image.save(folder / name)
        asked = "<image>" * len(names) + "What is it?"
        lines.append(json.dumps({**row, "prompt": [{"role": "user", "content": asked}], "images": names}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")


def by_hand(rows: list[dict[str, Any]], method: str, folder: Path, out: Path) -> list[float]:
    """The losses of TRL's own trainer with TRL's own collator."""
    trainer, arguments, _, settings = TRAINERS[method]
    kinds: dict[str, Any] = {name: Json() for name in rows[0]} | {"images": List(Image())}
    data, given = Dataset.from_list(rows, features=Features(kinds)), {}
    set_seed(0)
    model: Any = load_as_trained(folder)
    model.set_attn_implementation("eager")
    if method in ("dpo", "kto"):
        given["ref_model"] = load_as_trained(folder)
        given["ref_model"].set_attn_implementation("eager")
        data = data.shuffle(seed=0) if method == "kto" else data
    else:
        scope: dict[str, Any] = {}
        exec(REWARD, scope)
        given["reward_funcs"] = [scope["length"]]
        settings = settings | {"beta": 0.0}
    made = arguments(str(out), **ARGUMENTS | settings | {"max_steps": STEPS})
    found: list[float] = []
    processor = AutoProcessor.from_pretrained(folder)
    watched(trainer, found)(model=model, args=made, train_dataset=data, processing_class=processor, **given).train()
    return found


@pytest.fixture
def pictures(job_data: dict[str, Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Makes a job of a method on the rows."""

    def make(method: str, model_type: str, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        folder = media_folder(model_type, tmp_path / "base")
        write_rows(rows or rows_of(method), tmp_path)
        job_data["model"] = {"weights": str(folder), "ops_implementation": {"preset": "eager"}}
        job_data["data"] = {"files": "rows.jsonl", "sequence_length": 96}
        job_data["train"] |= {"steps": STEPS, "batch_size": 4, "method": method, "save_every": "never"}
        if method in ("grpo", "rloo"):
            judged = {"reward": "rewards.py:length", "max_completion_length": 16, "num_generations": 4, "beta": 0}
            job_data["train"][method] = judged
        return job_data

    return make


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "model_type", [needs_torchvision(each) for each in ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "internvl")]
)
def test_a_job_on_images_has_the_losses_of_trls_trainer(
    pictures: Any, train: Train, losses: Losses, run: Path, tmp_path: Path, model_type: str, method: str
) -> None:
    train(pictures(method, model_type))
    expected = by_hand(rows_of(method), method, tmp_path / "base", tmp_path / "hand")
    assert len(set(expected)) > 1
    assert [loss for _, loss in losses(run)] == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_bound_and_with_an_adapter_it_learns_and_exports_its_processor(
    pictures: Any, train: Train, losses: Losses, run: Path, method: str
) -> None:
    data = pictures(method, "gemma3")
    found = []
    for preset in ("eager", "auto"):
        data["model"]["ops_implementation"] = {"preset": preset}
        train(data, "train.steps=2", "train.save_every=2", "train.export=true", overwrite=True)
        found.append([loss for _, loss in losses(run)])
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)
    assert type(AutoProcessor.from_pretrained(run / "model")).__name__ == "Gemma3Processor"
    assert type(load_as_trained(run / "model")).__name__ == "Gemma3ForConditionalGeneration"
    data["lora"] = {"rank": 4}
    train(data, "train.steps=2", "train.save_every=2", overwrite=True)
    assert not [name for name in load_file(run / "checkpoint-2" / "adapter_model.safetensors") if "vision" in name]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("orpo", {}, "orpo learns text alone; pretrain and sft take media, and dpo, kto, grpo and rloo images"),
    ("reward", {}, "reward learns text alone"),
    ("dpo", {"images": ["none.png"]}, r"rows\.jsonl, line 1: image 'none.png' is not there"),
    ("dpo", {"images": ["0-0.png", "0-0.png"]}, "1 places for images, and its column holds 2"),
    ("dpo", {"prompt": "What is it?<video>", "videos": ["0-0.png"], "images": []}, "there is video in the row, and"),
    ("dpo", {"chosen": [{"role": "assistant", "content": [{"type": "image"}]}]}, "an answer has a place for media"),
    ("dpo", {"tools": [{"type": "function", "function": {"name": "see"}}]}, "TRL renders no tools beside images"),
    ("grpo", {"prompt": "What is it?", "images": []}, "prompt 1 has no image, and others have one"),
]


@pytest.mark.thorough(one_per=["method"])
@pytest.mark.parametrize(("method", "changed", "what"), REFUSED, ids=[f"{each[0]}-{each[2][:24]}" for each in REFUSED])
def test_what_trl_can_t_train_on_is_refused_before_the_first_step(
    pictures: Any, train: Train, tmp_path: Path, method: str, changed: dict[str, Any], what: str
) -> None:
    data = pictures("grpo" if method == "grpo" else "dpo", "gemma3")
    data["train"]["method"] = method
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [{**lines[0], **changed}, *lines[1:]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(JobFileError, match=what):
        train(data)
    if "none.png" in str(changed):
        train(data, "data.media_errors=skip", "train.steps=1")


@pytest.mark.thorough
def test_a_prompt_whose_images_leave_no_room_is_refused(pictures: Any, train: Train) -> None:
    with pytest.raises(JobFileError, match="prompt 1 has .* tokens, and data.sequence_length leaves"):
        train(pictures("dpo", "gemma3"), "data.sequence_length=24")
