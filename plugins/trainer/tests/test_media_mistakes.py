"""Mistakes in rows with pictures end in an error that names the file and the row, or are counted and left out."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from test_decoded_images import bomb, half_a_jpeg
from tiny_processors import media_folder, picture

from veomni_core.errors import ConfigError, JobFileError

Train = Callable[..., bool]


@pytest.fixture(scope="session")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return media_folder("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Pictures that can be read, and files that can't."""
    picture("red", 16).save(tmp_path / "red.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "red.png").read_bytes()[:40])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "words.png").write_text("no picture")
    (tmp_path / "folder.png").mkdir()
    frames = [picture(colour, 16) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    PIL.Image.new("CMYK", (16, 16)).save(tmp_path / "cmyk.jpg")
    (tmp_path / "bomb.png").write_bytes(bomb())
    (tmp_path / "half.jpg").write_bytes(half_a_jpeg())
    (tmp_path / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    return tmp_path


def chat(words: str, answer: str = "red", **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": answer}], **columns}


def part(**source: Any) -> dict[str, Any]:
    asked = [{"type": "image", **source}, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "red"}]}


GOOD = chat("<image> What is it?", images=["red.png"])
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a placeholder without a column": (chat("<image> What is it?"), "1 places for images, and its column holds 0"),
    "more placeholders than pictures": (chat("<image><image>", images=["red.png"]), "2 places .* its column holds 1"),
    "fewer placeholders than pictures": (chat("<image>", images=["red.png"] * 2), "1 places .* its column holds 2"),
    "a column without a turn of the user": (
        {"messages": [{"role": "assistant", "content": "red"}], "images": ["red.png"]},
        "no turn of the user",
    ),
    "no such file": (chat("<image>", images=["blue.png"]), "'blue.png' .*is not there; paths go from"),
    "a folder": (chat("<image>", images=["folder.png"]), "is a folder"),
    "an empty file": (chat("<image>", images=["empty.png"]), "empty.png is empty"),
    "a file that is cut off": (chat("<image>", images=["cut.png"]), "cut.png is (broken|no image)"),
    "a file of words": (chat("<image>", images=["words.png"]), "is no image that Pillow knows"),
    "an animation": (chat("<image>", images=["moving.gif"]), "is animated, with 2 frames"),
    "an address": (chat("<image>", images=["https://example.org/a.png"]), "an address, .* data.media_urls: true"),
    "a number": (chat("<image>", images=[3]), "must be a path, bytes"),
    "no base64": (chat("<image>", images=["data:image/png;base64,!!"]), "is no base64"),
    "bytes that are none": (chat("<image>", images=[{"bytes": None, "path": None}]), "must be a path, bytes"),
    "a part of no file": (part(path="blue.png"), "'blue.png' .*is not there"),
    "a part beside an empty column": (part(), "1 places for images, and its column holds 0"),
    "audio for a model of pictures": (chat("<audio>", audios=["red.png"]), "takes: image"),
    "a video for a model of pictures": (chat("<video>", videos=["red.png"]), "there is video .* takes: image"),
    "a decompression bomb": (chat("<image>", images=["bomb.png"]), "bomb.png has more than .* decompression bomb"),
    "half a photo": (chat("<image>", images=["half.jpg"]), "half.jpg is broken: image file is truncated"),
    "a drawing": (chat("<image>", images=["drawing.svg"]), "drawing.svg is no image that Pillow knows"),
    "an answer with a placeholder": (chat("<image>", "<image>", images=["red.png"]), "has 2 of '<image>' for 1 images"),
    "a list in a list": (chat("<image>", images=[["red.png"]]), "must be a path, bytes"),
    "nothing in a list": (chat("<image>", images=[None]), "must be a path, bytes"),
    "an empty path": (chat("<image>", images=[" "]), "must be a path, bytes"),
    "a mapping without a path": (chat("<image>", images={"name": "red.png"}), "must be a path, bytes"),
    "a list that is cut off": (chat("<image>", images='["red.png"'), r"'\[\"red.png\"' is not there"),
    "a file's address": (chat("<image>", images=["file://blue.png"]), "'file://blue.png' is not there"),
    "two columns of a kind": (
        chat("<image>", images=["red.png"], image="red.png"),
        "'image' is not empty, .* one column",
    ),
    "a part of no kind": (
        {"messages": [{"role": "user", "content": [{"type": "sketch"}]}, {"role": "assistant", "content": "red"}]},
        "turn 1 has a part of type 'sketch'; known are",
    ),
    "a part that is a number": (part(path=3), "must be a path, bytes"),
    "a name that no file can have": (chat("<image>", images=["a" * 300 + ".png"]), "aaa.* is not there"),
    "an address in capitals": (chat("<image>", images=["HTTPS://example.org/a.png"]), "an address, .* data.media_urls"),
    "a number of bytes": (chat("<image>", images=[{"bytes": 10**12}]), r"must be a path, .*got \{'bytes': 1000000"),
    "brackets that nobody closes": (chat("<image>", images="[" * 100_000), r"'\[\[.* is not there"),
    "a part that is text": (part(url="data:image/png;base64,aGVsbG8="), "an image of 5 bytes is no image"),
}


def job_on(rows: list[dict[str, Any]], job_data: dict[str, Any], folder: Path, model: Path, **data: Any) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job_data["model"] = {"weights": str(model), "ops_implementation": {"preset": "eager"}}
    job_data["data"] = {"files": "rows.jsonl", "sequence_length": 200, **data}
    job_data["train"] |= {"steps": 1, "save_every": "never"}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_names_the_file_and_the_row(
    name: str, job_data: dict[str, Any], train: Train, pictures: Path, llava: Path
) -> None:
    row, words = MISTAKES[name]
    job_on([GOOD, row], job_data, pictures, llava)
    with pytest.raises(JobFileError, match=rf"rows\.jsonl, (line|row) 2: .*{words}"):
        train(job_data)


@pytest.mark.thorough
def test_rows_with_broken_pictures_are_counted_and_left_out(
    job_data: dict[str, Any], train: Train, pictures: Path, llava: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_on([GOOD, MISTAKES["a file of words"][0], GOOD], job_data, pictures, llava, media_errors="skip")
    train(job_data)
    assert "1 row" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_picture_that_ends_after_the_sequence_is_refused(
    job_data: dict[str, Any], train: Train, pictures: Path, llava: Path
) -> None:
    job_on([GOOD, GOOD], job_data, pictures, llava)
    job_data["data"]["sequence_length"] = 8
    with pytest.raises(JobFileError, match=r"its media end at token \d+, and data.sequence_length is 8"):
        train(job_data)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("row", [GOOD, part(path="red.png")], ids=["a column", "a part"])
def test_a_model_of_text_refuses_pictures(
    row: dict[str, Any], job_data: dict[str, Any], train: Train, pictures: Path, pretrained: Path
) -> None:
    job_on([row, row], job_data, pictures, pretrained / "llama")
    job_data["data"] |= {"sequence_length": 32, "chat_template": "chat.jinja"}
    (pictures / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises((JobFileError, ConfigError), match="image"):
        train(job_data)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "where"), [("images", "line 1: column 'images' is not empty"), ("seen", "has 'seen'")]
)
def test_a_method_on_rows_says_that_it_learns_text_alone(
    name: str, where: str, job_data: dict[str, Any], train: Train, pictures: Path, llava: Path
) -> None:
    row = {"prompt": "<image> What is it?", "chosen": "red", "rejected": "blue", name: ["red.png"]}
    columns = {each: each for each in ("prompt", "chosen", "rejected")} | {"images": name}
    job_on([row, row], job_data, pictures, llava, columns=columns if name == "seen" else None)
    with pytest.raises(
        JobFileError, match=rf"{where}, and train\.method: orpo learns text alone; pretrain and sft take"
    ):
        train(job_data, "train.method=orpo")


@pytest.mark.thorough
def test_cmyk_and_bytes_are_read(job_data: dict[str, Any], train: Train, pictures: Path, llava: Path) -> None:
    shutil.copy(pictures / "red.png", pictures / "a red.png")
    inline = f"DATA:image/png;base64,{base64.b64encode((pictures / 'red.png').read_bytes()).decode()}"
    named = [chat("<image>", images=[name]) for name in ("cmyk.jpg", f"file://{pictures}/a%20red.png", inline)]
    job_on([GOOD, *named, part(path="red.png")], job_data, pictures, llava)
    train(job_data)


@pytest.mark.thorough
def test_a_text_that_holds_the_token_of_images_is_refused(
    job_data: dict[str, Any], train: Train, pictures: Path
) -> None:
    """Beside a row with a picture transformers would count it as a part of that, and raise while it trains."""
    folder = media_folder("gemma3", pictures / "gemma")
    for row in (chat("Say <soft>."), chat("<image> Say <soft>.", images=["red.png"]), chat("Say it.", "<soft>")):
        job_on([GOOD, row], job_data, pictures, folder)
        with pytest.raises(
            JobFileError, match=r"line 2: holds '<soft>' in its text, in whose place the model takes im"
        ):
            train(job_data)
    (pictures / "words.txt").write_text("Say <soft>.")
    with pytest.raises(JobFileError, match=r"words\.txt holds '<soft>' in its text"):
        train(job_data, "data.files=words.txt")
    said = [{"prompt": "Say it.", "chosen": answer, "rejected": "blue"} for answer in ("red", "<soft>")]
    job_on(said, job_data, pictures, folder)
    with pytest.raises(JobFileError, match=r"line 2: holds '<soft>' in its text"):
        train(job_data, "train.method=dpo")


@pytest.mark.thorough
def test_sound_is_read_as_openai_writes_it_and_refused_where_it_is_none(
    job_data: dict[str, Any], train: Train, pictures: Path
) -> None:
    """Base64 without a slash among its first 255 characters looks like the name of a file that no file can have."""
    import soundfile

    folder = media_folder("qwen2_audio", pictures / "audio")
    soundfile.write(pictures / "tone.wav", np.zeros(16_000), 16_000, subtype="PCM_16")
    soundfile.write(pictures / "click.wav", np.zeros(10), 16_000, subtype="PCM_16")
    soundfile.write(pictures / "nan.wav", np.full(16_000, np.nan), 16_000, subtype="FLOAT")
    (pictures / "none.wav").write_bytes(b"RIFF\0\0\0\0WAVE")
    data = base64.b64encode((pictures / "tone.wav").read_bytes()).decode()
    assert "/" not in data[:255]
    said = part(type="input_audio", input_audio={"data": data, "format": "wav"})
    job_on([said, said], job_data, pictures, folder)
    train(job_data)
    for name, words in (
        ("click", "Qwen2AudioProcessor makes no token of one of its media, which is too short"),
        ("nan", "nan.wav has samples that are no numbers"),
        ("none", "none.wav is broken: "),
    ):
        job_on([said, chat("<audio>", audios=[f"{name}.wav"])], job_data, pictures, folder)
        with pytest.raises(JobFileError, match=rf"rows\.jsonl, line 2: .*{words}"):
            train(job_data, overwrite=True)
