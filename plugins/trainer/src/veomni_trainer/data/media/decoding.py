"""Decodes images, video and audio, by the libraries that ``datasets`` and transformers decode them with."""

from __future__ import annotations

import base64
import io
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from veomni_core.errors import HostError
from veomni_trainer.data.media.sources import Medium
from veomni_trainer.data.reading import BadMedia
from veomni_transformers.jobs.job_files import first_line

EXTRA = "pip install 'veomni-trainer[media]'"
_THUMBNAIL = (96, 96)


def decode(medium: Medium, sampling_rate: int | None = None) -> Any:
    """An RGB image of Pillow, the frames of a video with their metadata, or samples at ``sampling_rate``.

    Raises:
        BadMedia: it is broken, too large, or something else.
        HostError: this machine has no decoder for its kind.
    """
    if medium.kind == "image":
        return _image(medium)
    return _video(medium) if medium.kind == "video" else _audio(medium, sampling_rate)


def thumbnail(image: Any) -> str:
    """A small copy of an image, as a data URI."""
    small = image.copy()
    small.thumbnail(_THUMBNAIL)
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _image(medium: Medium) -> Any:
    """The image, turned as its EXIF data says. 16 bits become 8, palettes and CMYK become RGB, and alpha is dropped."""
    if not find_spec("PIL"):
        raise HostError(f"image {medium.name} needs a decoder, and Pillow is not here: {EXTRA}")
    import datasets
    import PIL.Image

    data = medium.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            image = datasets.Image().decode_example({"path": None, "bytes": data})
            frames = getattr(image, "n_frames", 1)
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        limit = PIL.Image.MAX_IMAGE_PIXELS or 0
        raise BadMedia(f"image {medium.name} has more than {limit:,} pixels, as a decompression bomb has") from None
    except PIL.UnidentifiedImageError:
        raise BadMedia(f"image {medium.name} is no image that Pillow knows") from None
    except Exception as error:  # Pillow raises what a broken file leads to
        raise BadMedia(f"image {medium.name} is broken: {first_line(error)}") from None
    if frames > 1:
        raise BadMedia(f"image {medium.name} is animated, with {frames} frames; save one of them, or make it a video")
    if image.mode.startswith(("I", "F")):  # Pillow would cut off what is above 255
        values = np.asarray(image, np.float64)
        image = PIL.Image.fromarray((values / (257.0 if image.mode != "F" else 1.0)).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def _audio(medium: Medium, sampling_rate: int | None) -> Any:
    from transformers.audio_utils import load_audio

    if not (find_spec("soundfile") and find_spec("soxr")):
        raise HostError(f"{medium.kind} {medium.name} needs a decoder, and soundfile and soxr are not here: {EXTRA}")
    source = medium.path or f"data:audio/wav;base64,{base64.b64encode(medium.data).decode()}"
    try:
        samples = load_audio(source, sampling_rate=sampling_rate or 16_000)
    except Exception as error:  # the decoders raise what a broken file leads to
        raise BadMedia(f"audio {medium.name} is broken: {first_line(error)}") from None
    if not samples.size:
        raise BadMedia(f"audio {medium.name} has no samples")
    if not np.isfinite(samples).all():
        raise BadMedia(f"audio {medium.name} has samples that are no numbers")
    return samples


def _video(medium: Medium) -> Any:
    """``(frames, metadata)``, as transformers' video processors take them."""
    from transformers.video_utils import load_video

    if not find_spec("av"):
        raise HostError(f"{medium.kind} {medium.name} needs a decoder, and PyAV is not here: {EXTRA}")
    with tempfile.TemporaryDirectory(prefix="veomni-video-") as folder:
        path = Path(medium.path)
        if not medium.path:
            path = Path(folder) / "video"
            path.write_bytes(medium.data)
        try:
            source: Any = str(path)
            frames, metadata = load_video(source, backend="pyav")
        except Exception as error:  # as above
            raise BadMedia(f"video {medium.name} is broken: {first_line(error)}") from None
    if not len(frames):
        raise BadMedia(f"video {medium.name} has no frames")
    return frames, metadata
