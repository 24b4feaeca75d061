"""Images of every mode are decoded to what they show; those that can't be are refused by what is wrong with them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest
from tiny_processors import picture

from veomni_trainer.data.media.decoding import decode
from veomni_trainer.data.media.sources import Medium
from veomni_trainer.data.reading import BadMedia


def stored(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def decoded(data: bytes) -> Any:
    image = decode(Medium("image", data=data))
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def half() -> Any:
    """Red on the left and blue on the right, twice as wide as high."""
    image = PIL.Image.new("RGB", (32, 16), (220, 30, 30))
    image.paste((40, 60, 220), (16, 0, 32, 16))
    return image


def grey16(left: int, right: int) -> Any:
    return PIL.Image.fromarray(np.tile(np.repeat([left, right], 8), (8, 1)).astype(np.uint16))


@pytest.mark.parametrize("mode", ["P", "RGBA", "PA", "1", "L", "LA", "CMYK"])
def test_modes_show_what_they_show(mode: str) -> None:
    there = picture("red").convert("L") if mode in ("1", "L", "LA") else picture("red")
    image = there.quantize(4) if mode in ("P", "PA") else there.convert(mode)
    data = stored(image, "TIFF" if mode == "CMYK" else "PNG", **({"transparency": 0} if mode == "PA" else {}))
    shown = there.convert("1") if mode == "1" else there  # dithered
    assert np.abs(decoded(data) - np.asarray(shown.convert("RGB")).astype(int)).max() <= 2


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [(1, lambda a: a), (3, lambda a: a[::-1, ::-1]), (6, lambda a: np.rot90(a, -1)), (8, np.rot90)],
)
def test_a_photo_is_turned_as_its_camera_was_held(orientation: int, turned: Callable[[Any], Any]) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    shown = decoded(stored(half(), "PNG", exif=exif))
    assert np.array_equal(shown, turned(np.asarray(half()).astype(int)))


def test_sixteen_bits_become_eight() -> None:
    shown = decoded(stored(grey16(0x2000, 0xE000)))
    assert np.abs(shown[:, :8] - 0x20).max() <= 1 and np.abs(shown[:, 8:] - 0xE0).max() <= 1
    assert np.abs(decoded(stored(grey16(0, 65535)))[:, 8:] - 255).max() == 0


def bomb() -> bytes:
    """A PNG that says it has 400 million pixels."""
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def half_a_jpeg() -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    data = stored(PIL.Image.fromarray(noise), "JPEG")
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (bomb, "more than .* pixels, as a decompression bomb"),
        (half_a_jpeg, "is broken: image file is truncated"),
        (lambda: b"\x89PNG\r\n\x1a\n", "is (broken|no image that Pillow knows)"),
        (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image that Pillow knows"),
        (lambda: stored(picture("red"), "GIF", save_all=True, append_images=[picture("blue")]), "animated, with 2"),
    ],
    ids=["a bomb", "half a JPEG", "a header alone", "an SVG", "an animation"],
)
def test_what_is_no_picture_is_refused(make: Callable[[], bytes], words: str) -> None:
    with pytest.raises(BadMedia, match=words):
        decode(Medium("image", data=make()))
