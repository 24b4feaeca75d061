"""What comes out of a job on pictures: checkpoints and exports that have its processor, answers, and a report."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import yaml
from test_answering import answer, veomni
from test_equals_transformers_on_media import wave
from test_media_mistakes import GOOD, chat, job_on, part
from tiny_configs import LLAMA
from tiny_processors import COLOURS, media_folder, needs_torchvision, picture
from transformers import AutoModelForImageTextToText, AutoProcessor

from veomni_core.errors import ConfigError, JobFileError
from veomni_trainer.data.batches import Batcher
from veomni_trainer.job.load import load_job
from veomni_trainer.job.source_keys import PROCESSOR_FILES
from veomni_trainer.output.export import export_checkpoint
from veomni_trainer.run.run_job import run_job
from veomni_transformers.build import load_as_trained

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


@pytest.mark.parametrize(
    "lora", [pytest.param(None, marks=pytest.mark.thorough), {"rank": 4}], ids=["whole", "adapter"]
)
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


@pytest.mark.thorough
def test_a_processor_of_another_model_is_refused(
    pictures: dict[str, Any], train: Train, gemma: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(gemma, tmp_path / "other")
    config = json.loads((other / "config.json").read_text(encoding="utf-8")) | {"image_token_id": 7}
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    train(pictures)  # whose tokens are stored
    pictures["model"]["weights"] = str(other)
    with pytest.raises(ConfigError, match="is not the model's: it writes no token 7 for an image, .* image_token_id"):
        train(pictures, overwrite=True)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, gemma: Path) -> Path:
    """The run of a job that has learned to name colours, and its export."""
    root = tmp_path_factory.mktemp("learned")
    for colour in COLOURS:
        picture(colour).save(root / f"{colour}.png")
    rows = [chat("<image> What is it?", colour, images=[f"{colour}.png"]) for colour in COLOURS]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = {
        "model": {"weights": str(gemma), "ops_implementation": {"preset": "auto"}},
        "data": {"files": "rows.jsonl", "sequence_length": 64},
        "train": {
            "output_dir": str(root / "run"),
            "steps": 150,
            "batch_size": 4,
            "learning_rate": 4e-3,
            "export": True,
        },
    }
    job["train"]["device"] = "cpu"
    (root / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    run_job(load_job(root / "job.yaml"))
    return root / "run"


def by_transformers(folder: Path, image: Path) -> str:
    """The likeliest answer by the model's own code and its own processor."""
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(CHAT, add_generation_prompt=True)
    given = processor(text=[text], images=[[PIL.Image.open(image).convert("RGB")]], return_tensors="pt")
    with torch.no_grad():
        found = model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return str(processor.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.thorough
def test_a_run_and_its_export_answer_about_a_picture(learned: Path, gemma: Path) -> None:
    prompt, template = ("--prompt", "What is it?"), AutoProcessor.from_pretrained(gemma)
    text = template.apply_chat_template(CHAT, add_generation_prompt=True).replace("<boi>", "<image>")
    for colour in COLOURS:
        image = learned.parent / f"{colour}.png"
        assert by_transformers(learned / "model", image) == colour
        for folder in (learned, learned / "model"):
            assert answer("chat", folder, *prompt, "--image", image, "--max-new-tokens", 8)["text"] == colour
        assert answer("generate", learned, "--prompt", text, "--image", image, "--max-new-tokens", 8)["text"] == colour


@pytest.mark.thorough
def test_an_image_that_no_one_can_answer_about_is_refused(learned: Path, pretrained: Path, tmp_path: Path) -> None:
    image, blind = learned.parent / "red.png", shutil.copytree(learned / "model", tmp_path / "blind")
    for name in PROCESSOR_FILES:
        (blind / name).unlink(missing_ok=True)
    for folder, prompt, picture_at, words in (
        (pretrained / "llama", "hi", image, "llama takes no image; leave it out"),
        (blind, "hi", image, "has no processor of media (processor_config.json"),
        (learned, "hi", tmp_path / "none.png", "none.png' is not there"),
        (learned, "<image><image>", image, "2 places for images"),
    ):
        error = veomni("generate", folder, "--prompt", prompt, "--image", picture_at).exception
        assert isinstance(error, ConfigError) and words in str(error) and "--image: " in str(error), error


@pytest.mark.thorough
def test_the_report_shows_the_first_pictures_with_their_text(learned: Path) -> None:
    page = (learned / "report.html").read_text(encoding="utf-8")
    shown = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt=""><figcaption><span>(.*?)</span>', page)
    assert [words for _, words in shown] == [f"What is it? | {colour}" for colour in COLOURS]
    for (data, _), colour in zip(shown, COLOURS, strict=True):
        assert PIL.Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == picture(colour).tobytes()


@pytest.mark.thorough
def test_a_sound_is_answered_about_and_refused_by_a_model_of_pictures(learned: Path, tmp_path: Path) -> None:
    import soundfile

    sound, folder = tmp_path / "tone.wav", media_folder("qwen2_audio", tmp_path / "model")
    soundfile.write(sound, wave(400.0, 0.8), 16_000, subtype="PCM_16")
    model, processor = load_as_trained(folder).eval(), AutoProcessor.from_pretrained(folder)
    chat = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What is it?"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    given = processor(text=[text], audio=[soundfile.read(sound)[0]], sampling_rate=16_000, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=2)
    said = processor.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    words = ("--prompt", "What is it?", "--audio", sound, "--max-new-tokens", 8)
    assert answer("chat", folder, *words)["text"] == said
    error = veomni("chat", learned, *words).exception
    assert isinstance(error, ConfigError) and "--audio: the model in" in str(error) and "takes no audio" in str(error)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", [needs_torchvision("qwen3_vl"), needs_torchvision("qwen2_5_vl")])
def test_videos_are_learned_and_answered_about(
    job_data: dict[str, Any], train: Train, run: Path, tmp_path: Path, model_type: str
) -> None:
    av = pytest.importorskip("av")
    for colour in ("red", "blue"):
        with av.open(str(tmp_path / f"{colour}.mp4"), "w") as film:
            stream = film.add_stream("mpeg4", rate=4)
            stream.width = stream.height = 32
            stream.pix_fmt = "yuv420p"
            frame = av.VideoFrame.from_image(picture(colour, 32))
            film.mux([packet for each in [*[frame] * 8, None] for packet in stream.encode(each)])
    rows = [chat("<video>What is it?", colour, videos=[f"{colour}.mp4"]) for colour in ("red", "blue")]
    job_on(rows, job_data, tmp_path, media_folder(model_type, tmp_path / "base"))
    job_data["train"] |= {"steps": 90, "learning_rate": 5e-3, "export": True, "save_every": 90}
    train(job_data)
    for colour in ("red", "blue"):
        words = ("--prompt", "What is it?", "--video", tmp_path / f"{colour}.mp4", "--max-new-tokens", 8)
        assert answer("chat", run / "model", *words)["text"] == colour


@pytest.mark.thorough
def test_other_processes_make_the_batches_of_a_run_and_name_a_file_that_changed(
    pictures: dict[str, Any],
    train: Train,
    run: Path,
    losses: Losses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(pictures)
    alone = losses(run)
    shutil.rmtree(run)
    pictures["data"] |= {"workers": 2}
    train(pictures)
    assert losses(run) == alone
    shutil.rmtree(run)
    made, here = Batcher.__call__, os.getpid()

    def after_files_were_emptied_elsewhere(self: Batcher, sequences: Any) -> Any:
        for colour in ("red", "green", "blue") if os.getpid() != here else ():
            (tmp_path / f"{colour}.png").write_bytes(b"")
        return made(self, sequences)

    monkeypatch.setattr(Batcher, "__call__", after_files_were_emptied_elsewhere)
    with pytest.raises(JobFileError, match="which could be read before training$") as found:
        train(pictures)
    assert str(found.value).startswith(str(tmp_path))  # and not with torch's trace of the process
