"""The parts of a model beside its text decoder: towers of vision and audio, and what projects between them and text.

They are found by structure: a tower is a model of transformers that takes no text, and the decoder one that does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

VISION, AUDIO, PROJECTOR = "vision", "audio", "projector"
KINDS = (VISION, AUDIO, PROJECTOR)
_OF_TEXT = {"input_ids", "inputs_embeds", "decoder_input_ids"}
_MODALITIES = {VISION: {"image", "video"}, AUDIO: {"audio"}}
# Of models that don't declare what they take: their first argument, and the name of their config.
_SAID = {VISION: r"pixel|vision|image|vit", AUDIO: r"input_features|audio|speech|acoustic|encodec"}


def towers(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The paths of the modules and single parameters beside the text decoder of ``model``, by kind.

    ``vision`` takes images or video, ``audio`` sound, and ``projector`` is what belongs to neither and not to the
    decoder, its embeddings or its head. Empty for a model of text alone.

    Example:
        >>> from transformers import LlavaConfig, LlavaForConditionalGeneration
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = LlavaForConditionalGeneration(LlavaConfig())
        >>> towers(model)
        {'vision': ('model.vision_tower',), 'projector': ('model.multi_modal_projector',)}
    """
    found: dict[str, list[str]] = {}
    words = _words(model)
    kinds, text = {}, set()
    for path, module in model.named_modules():
        if path and any(module is each for each in words):
            text.add(path)
        elif path and isinstance(module, PreTrainedModel):
            if not _holds(module, words):
                kinds[path] = tower_kind(module)
                if _OF_TEXT & inspect.signature(type(module).forward).parameters.keys():
                    text.add(path)
            elif not any(tower_kind(each) and not _holds(each, words) for each in module.modules()):
                text.add(path)
    kinds = {path: kind for path, kind in kinds.items() if kind}
    # Where layers of the decoder stand beside towers, nothing says what a projector is.
    has_decoder = any(isinstance(model.get_submodule(path), PreTrainedModel) for path in text)
    if kinds:
        for path, kind in _beside(model, "", kinds, text):
            if kind != PROJECTOR or has_decoder:
                found.setdefault(kind, []).append(path)
    return {kind: tuple(found[kind]) for kind in KINDS if kind in found}


def media_kinds(model: nn.Module) -> tuple[str, ...]:
    """Of ``image``, ``video`` and ``audio``, what ``model`` takes beside text; none for a text decoder alone.

    A decoder's class may say what the whole model takes, so it must have an argument for it too.
    """
    parameters = inspect.signature(type(model).forward).parameters
    if not any(re.search("|".join(_SAID.values()), name) for name in parameters):
        return ()
    said = getattr(model, "input_modalities", "text")
    kinds = {said} if isinstance(said, str) else {*said}
    if kinds == {"text"}:
        kinds = {kind for tower in towers(model) for kind in _MODALITIES.get(tower, ())}
    return tuple(kind for kind in ("image", "video", "audio") if kind in kinds)


def tower_of(found: dict[str, tuple[str, ...]], name: str) -> str:
    """The kind of the tower in which the module or parameter ``name`` is; empty for the decoder's."""
    for kind, paths in found.items():
        if any(f"{name}.".startswith(f"{path}.") for path in paths):
            return kind
    return ""


def tower_kind(module: nn.Module) -> str:
    """Of a model that takes no text; empty for others, and for one of which nothing says what it takes."""
    if not isinstance(module, PreTrainedModel):
        return ""
    said = getattr(module, "input_modalities", "text")
    taken = {said} if isinstance(said, str) else {*said}
    parameters = [*inspect.signature(type(module).forward).parameters]
    if "text" in taken and _OF_TEXT & {*parameters}:
        return ""
    for kind, modalities in _MODALITIES.items():
        if taken - {"text"} and taken - {"text"} <= modalities:
            return kind
    names = f"{' '.join(parameters[1:2])} {type(module.config).__name__}".lower()
    return next((kind for kind, word in _SAID.items() if re.search(word, names)), "")


def _words(model: nn.Module) -> list[nn.Module]:
    """The embeddings of words, and their output projection."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, name)())
        except (AttributeError, NotImplementedError):  # a model without words
            continue
    return [each for each in found if each is not None]


def _holds(module: nn.Module, words: list[nn.Module]) -> bool:
    return any(each is word for each in module.modules() for word in words)


def _beside(module: nn.Module, path: str, kinds: dict[str, str], text: set[str]) -> Iterator[tuple[str, str]]:
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if below in kinds:
            yield below, kinds[below]
        elif below in text:
            continue
        elif any(each.startswith(f"{below}.") for each in (*kinds, *text)):
            yield from _beside(child, below, kinds, text)
        elif any(True for _ in child.parameters()):
            yield below, PROJECTOR
    yield from (
        (f"{path}.{name}".lstrip("."), PROJECTOR) for name in module._parameters if module._parameters[name] is not None
    )
