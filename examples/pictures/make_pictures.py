"""Makes what the jobs here train on: pictures, two files of chats about them, and a tokenizer with a processor.

Run from here:  python make_pictures.py
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

COLOURS = {"red": "#dc1e1e", "green": "#14a03c", "blue": "#283cdc", "yellow": "#f0d228"}
SHAPES = ("disk", "square", "bar")
SIDE, PATCH = 16, 4
SPECIAL = ("<pad>", "<image>", "<|user|>", "<|assistant|>", "</s>")  # their ids are 0, 1, ...; bytes follow
TEMPLATE = """\
{%- for message in messages %}{{ '<|' + message.role + '|>' }}
{%- for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- if message.role == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def picture(colour: str, shape: str) -> Image.Image:
    """A shape of a colour on grey."""
    image = Image.new("RGB", (2 * SIDE, 2 * SIDE), "#808080")
    draw = ImageDraw.Draw(image)
    if shape == "disk":
        draw.ellipse((4, 4, 27, 27), fill=COLOURS[colour])
    else:
        draw.rectangle((4, 4, 27, 27) if shape == "square" else (2, 12, 29, 19), fill=COLOURS[colour])
    return image


def processor() -> LlavaProcessor:
    """LLaVA's, with a tokenizer of bytes."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:-1]]})
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    options = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, **options)


def main() -> None:
    """Write ``pictures`` and ``processor``."""
    folder = Path("pictures")
    folder.mkdir(exist_ok=True)
    chats: dict[str, list[str]] = {"captions.jsonl": [], "colours.jsonl": []}
    for colour, shape in product(COLOURS, SHAPES):
        name = f"{colour}-{shape}.png"
        picture(colour, shape).save(folder / name)
        said = ("What is it?", f"a {colour} {shape}"), ("Which colour?", colour)
        for lines, (question, answer) in zip(chats.values(), said, strict=True):
            turns = [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": turns, "images": [name]}) + "\n")
    for file, lines in chats.items():
        (folder / file).write_text("".join(lines), encoding="utf-8")
    processor().save_pretrained("processor")


if __name__ == "__main__":
    main()
