"""``data.image_pixels``: images have so many pixels, and so many tokens, whatever a processor calls the limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import transformers
from test_media_mistakes import chat, job_on
from tiny_processors import media_folder, tiny_llava_processor

from veomni_core.errors import ConfigError
from veomni_trainer.data.media.processor import MediaProcessor
from veomni_trainer.job.data_section import PixelBudget
from veomni_trainer.job.load import load_job
from veomni_trainer.run.start import read_data
from veomni_trainer.setup.model import job_tokenizer

LIMITS = [{"max": 60_000}, {"min": 90_000}, {"min": 40_000, "max": 80_000}]


def loaded(folder: Path, kind: str, **limits: int) -> Any:
    """The image processor of that class from ``folder``, with limits."""
    processor = tiny_llava_processor(getattr(transformers, f"{kind}ImageProcessorPil")())
    processor.save_pretrained(folder)
    pixels = PixelBudget(**limits) if limits else None
    return MediaProcessor(folder, processor.tokenizer, pixels=pixels).loaded.image_processor


def made(processor: Any, side: int) -> int:
    values = processor(images=[PIL.Image.new("RGB", (side, side))], return_tensors="pt")["pixel_values"]
    return int(values.numel() // 3 // getattr(processor, "temporal_patch_size", 1))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("kind", ["Qwen2VL", "Glm4v", "Ernie4_5_VLMoe", "Pixtral"])
def test_images_keep_to_the_limits_whatever_the_processor_calls_them(tmp_path: Path, kind: str, limits: Any) -> None:
    before = loaded(tmp_path / "before", kind)
    if kind == "Pixtral" and "min" in limits:
        with pytest.raises(ConfigError, match=r"image_pixels: Pixtral\w* can't go by {min: .*it makes [\d,]+ to"):
            loaded(tmp_path / "after", kind, **limits)
        return
    after = loaded(tmp_path / "after", kind, **limits)
    for side in (40, 250, 700):
        least, most = limits.get("min", 0), limits.get("max", made(before, 700))
        assert least <= made(after, side) <= most
        if least < made(before, side) < most:
            assert made(after, side) == made(before, side)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("kind", ["CLIP", "Gemma3", "Gemma4", "LlavaNext", "Idefics3"])
def test_a_processor_that_makes_what_it_makes_is_refused(tmp_path: Path, kind: str, limits: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"image_pixels: {kind}ImageProcessor\w* can't go by {{.*: it makes [\d,]+ to"
    ):
        loaded(tmp_path, kind, **limits)


@pytest.mark.parametrize(("most", "tokens"), [(None, 16 * 16), (1800, 3 * 3), (9216, 16 * 16)])
def test_a_row_has_as_many_tokens_as_its_pixels_say(
    job_data: dict[str, Any], write_job: Callable[..., Path], tmp_path: Path, most: int | None, tokens: int
) -> None:
    model = media_folder("llava", tmp_path / "base")
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 128}, patch_size=4)
    tiny_llava_processor(images).save_pretrained(model)
    PIL.Image.new("RGB", (64, 64)).save(tmp_path / "red.png")
    job_on([chat("<image>", images=["red.png"])], job_data, tmp_path, model, image_pixels=most and {"max": most})
    job_data["data"]["sequence_length"] = 512
    job = load_job(write_job(job_data))
    corpus = read_data(job, job_tokenizer(job))
    batch = corpus.batcher()([corpus.training[0]])
    side = int(tokens**0.5) * 4
    assert corpus.read[0].media_tokens == tokens and batch["pixel_values"].shape[-2:] == (side, side)
