"""Folders with tiny models of images or audio, and with their processors, made here: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
import pytest
from small_tokenizers import byte_level
from tiny_multimodal import CONFIGS, tiny_model
from transformers import LlavaProcessor, WhisperFeatureExtractor

WORDS = 384
COLOURS = {"red": (220, 30, 30), "green": (20, 160, 60), "blue": (40, 60, 220), "yellow": (240, 210, 40)}
# Marks what the assistant says, as TRL's and transformers' own masks need it. Parts come in the order of the content.
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{% for part in message.content %}{{ part.text }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO{% elif part.type == 'audio' %}AUDIO
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}{{ '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Of each family: what its template writes for a medium, the tokens that its tokenizer names, and how to make the rest.
_QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_QWEN3 = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_OMNI = {
    **{"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "audio_token": "<|AUDIO|>"},
    **{"vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>"},
    **{"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
}
_GLM = ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"]
OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
# Whose processors have one of videos.
NEEDS_TORCHVISION = ("qwen2_5_vl", *_QWEN3, "internvl", "glm4v", *OMNI)
FAMILIES = (*NEEDS_TORCHVISION, "gemma3", "llava", "paligemma", "mllama", "qwen2_audio")


def needs_torchvision(model_type: str, *more: Any, marks: Sequence[Any] = ()) -> Any:
    """The family as a parameter before ``more``, with ``marks``; skipped where its processor can't be made."""
    try:
        import torchvision  # noqa: F401

        there = True
    except (ImportError, RuntimeError):  # a build for another torch
        there = False
    skips = model_type in NEEDS_TORCHVISION and not there
    return pytest.param(
        model_type, *more, marks=[pytest.mark.skipif(skips, reason="its processor needs torchvision"), *marks]
    )


def media_folder(model_type: str, folder: Path) -> Path:
    """Writes a tiny model of the type, with its tokenizer and its processor, to ``folder``."""
    processor = _processor(model_type)
    processor.save_pretrained(folder)
    ids = {token: processor.tokenizer.convert_tokens_to_ids(token) for token in processor.tokenizer.get_added_vocab()}
    model = tiny_model(model_type, vocab_size=max(WORDS, len(processor.tokenizer)))
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= _token_ids(model_type, ids)
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def picture(colour: str, side: int = 16, mode: str = "RGB") -> PIL.Image.Image:
    """A disc on grey."""
    image = PIL.Image.new("RGB", (side, side), (128, 128, 128))
    PIL.ImageDraw.Draw(image).ellipse((2, 2, side - 3, side - 3), fill=COLOURS[colour])
    return image.convert(mode)


def _tokenizer(tokens: list[str], **named: str) -> Any:
    tokenizer = byte_level(None)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    for name, token in named.items():
        tokenizer.init_kwargs[name] = token
    return type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named or {},
    )


def _template(image: str = "", audio: str = "", video: str = "") -> str:
    return TEMPLATE.replace("IMAGE", image).replace("VIDEO", video).replace("AUDIO", audio)


def tiny_llava_processor(images: Any) -> Any:
    """LLaVA's processor with an image processor, which may be another family's: it counts what that makes."""
    options: Any = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, _tokenizer(["<image>"]), chat_template=_template("<image>"), **options)


def _processor(model_type: str) -> Any:
    import transformers

    sizes: Any = {"size": {"shortest_edge": 64, "longest_edge": 1024}, "patch_size": 4, "merge_size": 2}
    if model_type in ("qwen2_5_vl", *_QWEN3):
        tokenizer = _tokenizer(_QWEN)
        names = {"qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")}
        kind, video = names.get(model_type, ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"))
        template = _template(
            "<|vision_start|><|image_pad|><|vision_end|>", "", "<|vision_start|><|video_pad|><|vision_end|>"
        )
        image = transformers.Qwen2VLImageProcessorPil(**sizes, temporal_patch_size=2)
        videos = getattr(transformers, video)(**sizes, temporal_patch_size=2)
        return getattr(transformers, kind)(image, tokenizer, videos, chat_template=template)
    if model_type == "glm4v":
        template = _template("<|begin_of_image|><|image|><|end_of_image|>")
        image = transformers.Glm4vImageProcessorPil(**sizes, temporal_patch_size=2)
        videos = transformers.Glm4vVideoProcessor(**sizes, temporal_patch_size=2)
        return transformers.Glm4vProcessor(image, _tokenizer(_GLM), videos, chat_template=template)
    if model_type in OMNI:
        name = "Qwen2_5OmniProcessor" if model_type.startswith("qwen2") else "Qwen3OmniMoeProcessor"
        tokenizer = _tokenizer([*_OMNI.values()], **_OMNI)
        places = [f"<|vision_bos|>{_OMNI[f'{kind}_token']}<|vision_eos|>" for kind in ("image", "video")]
        template = _template(places[0], "<|audio_bos|><|AUDIO|><|audio_eos|>", places[1])
        image = transformers.Qwen2VLImageProcessorPil(**sizes, temporal_patch_size=2)
        videos = transformers.Qwen2VLVideoProcessor(**sizes, temporal_patch_size=2)
        extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1, n_fft=2000, hop_length=1000)
        return getattr(transformers, name)(image, videos, extractor, tokenizer, chat_template=template)
    if model_type == "paligemma":
        image = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
        image.image_seq_length = 16
        tokenizer = _tokenizer(["<image>"])
        tokenizer.bos_token = "<|endoftext|>"
        return transformers.PaliGemmaProcessor(image, tokenizer, chat_template=_template("<image>"))
    if model_type == "mllama":
        image = transformers.MllamaImageProcessorPil(size={"height": 16, "width": 16}, max_image_tiles=1)
        tokenizer = _tokenizer(["<|image|>", "<|python_tag|>"])
        tokenizer.bos_token = "<|endoftext|>"
        return transformers.MllamaProcessor(image, tokenizer, chat_template=f"<|endoftext|>{_template('<|image|>')}")
    if model_type == "gemma3":
        named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
        tokenizer = _tokenizer([*named.values()], **named)
        image = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return transformers.Gemma3Processor(image, tokenizer, _template("<boi>"), image_seq_length=4)
    if model_type == "llava":
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        return tiny_llava_processor(images)
    if model_type == "internvl":
        named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<ctx>"}
        tokenizer = _tokenizer([*named.values(), "<vid>"], **named, video_token="<vid>")
        image = transformers.GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=False)
        video = transformers.InternVLVideoProcessor(size={"height": 16, "width": 16})
        template = _template("<ctx>", "", "<vid>")
        return transformers.InternVLProcessor(image, tokenizer, video, image_seq_length=4, chat_template=template)
    tokenizer = _tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1, n_fft=2000, hop_length=1000)  # 16 frames
    template = _template("", "<|audio_bos|><|AUDIO|><|audio_eos|>")
    return transformers.Qwen2AudioProcessor(extractor, tokenizer, chat_template=template)


def _token_ids(model_type: str, ids: dict[str, int]) -> dict[str, Any]:
    if model_type in ("qwen2_5_vl", *_QWEN3):
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return dict(zip(names, (ids[token] for token in _QWEN), strict=True))
    if model_type == "gemma3":
        return {"image_token_id": ids["<soft>"], "boi_token_index": ids["<boi>"], "eoi_token_index": ids["<eoi>"]}
    if model_type == "glm4v":
        marks = ("image", "video", "image_start", "image_end", "video_start", "video_end")
        return {f"{name}_token_id": ids[token] for name, token in zip(marks, _GLM, strict=True)}
    if model_type in OMNI:
        marks = {"vision_start": "vision_bos", "vision_end": "vision_eos", "audio_start": "audio_bos"}
        marks |= {"audio_end": "audio_eos", "image": "image", "video": "video", "audio": "audio"}
        found = {f"{name}_token_id": ids[_OMNI[f"{token}_token"]] for name, token in marks.items()}
        return found | {name.replace("_id", "_index"): each for name, each in found.items()}
    if model_type == "mllama":
        return {"image_token_index": ids["<|image|>"]}
    token = {"llava": "<image>", "paligemma": "<image>", "internvl": "<ctx>", "qwen2_audio": "<|AUDIO|>"}[model_type]
    kind = "audio" if model_type == "qwen2_audio" else "image"
    return {f"{kind}_token_id": ids[token], f"{kind}_token_index": ids[token]}


assert set(FAMILIES) <= set(CONFIGS)
