"""Inputs for models that take words: token ids, what stands beside them, and pictures where a model wants both."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_transformers.attention.tower_inputs import PICTURES, Inputs, numbers, tower_inputs
from veomni_transformers.proving import probe
from veomni_transformers.proving.hollow_twin import BATCH, LENGTH, ZERO

CROSSED = ("encoder_hidden_states", "cross_attention_states", "encoder_outputs")
_DECODER_LENGTH = 7  # differs from the encoder's, so that cross-attention can be told apart
_MOST_CODEBOOKS = 64
_OF_WORDS = {"input_ids", "inputs_embeds", "attention_mask", "hidden_states", "decoder_input_ids", *CROSSED}


def word_inputs(module: Any, padded: bool, crossing: bool, beside: bool) -> Iterator[Inputs]:
    """The arguments with which the forward of ``module`` may run, with an encoder's states or pictures where asked.

    First token ids ``[batch, length]``, then ids of several codebooks at each position.
    """
    words, why_not = probe.attempt(partial(_words, module, padded, crossing))
    if why_not:
        return
    ids = next((name for name in ("decoder_input_ids", "input_ids") if name in words), "")
    for form in (words, *({**words, ids: _codes(words[ids], count)} for count in _codebooks(module) if ids)):
        if not beside:
            yield form
            continue
        for pictures in tower_inputs(module, type(module).forward, padded=False):
            known = {name: value for name, value in pictures.items() if name not in _OF_WORDS}
            if known.keys() & {*PICTURES}:
                yield known | _of_each_word(known) | form


def _words(module: Any, padded: bool, crossing: bool) -> Inputs:
    """Token ids, or embeddings in their place, in the shapes that the config of ``module`` gives."""
    parameters = inspect.signature(type(module).forward).parameters
    config = module.config
    known: Inputs = {"use_cache": False}
    if "input_ids" in parameters:
        known["input_ids"] = _tokens(module, LENGTH)
        known["decoder_input_ids"] = _tokens(module, _DECODER_LENGTH)
        known["bbox"] = torch.rand(BATCH, LENGTH, 4, generator=probe.generator()).sort(-1).values  # words on a page
        if padded:
            known["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
            known["attention_mask"][1, -3:] = 0
    elif "inputs_embeds" in parameters or "hidden_states" in parameters:
        name = "inputs_embeds" if "inputs_embeds" in parameters else "hidden_states"
        known[name] = ZERO.expand(BATCH, LENGTH, config.hidden_size)
    if crossing:
        states = ZERO.expand(BATCH, _DECODER_LENGTH, config.hidden_size)
        known |= {name: (states,) if name == "encoder_outputs" else states for name in CROSSED}
        known["encoder_attention_mask"] = torch.ones(BATCH, _DECODER_LENGTH, dtype=torch.long)
        known["encoder_attention_mask"][1, _DECODER_LENGTH - 2 * padded :] = 0
        known["cross_attention_mask"] = torch.zeros(BATCH, 1, LENGTH, _DECODER_LENGTH, dtype=ZERO.dtype)
    return {
        name: value for name, value in known.items() if name in parameters or (name == "use_cache" and _open(module))
    }


def _open(module: Any) -> bool:
    """Whether the forward takes ``use_cache`` among its ``**kwargs``."""
    kinds = {parameter.kind for parameter in inspect.signature(type(module).forward).parameters.values()}
    return "use_cache" in vars(module.config) and inspect.Parameter.VAR_KEYWORD in kinds


def _tokens(module: Any, length: int) -> Tensor:
    """Random token ids that are no special tokens of a config, if the vocabulary has any such ids.

    An encoder may know fewer ids than the decoder.
    """
    config = module.config
    configs = [config, config.get_text_config()]
    vocabulary = min([configs[-1].vocab_size, *numbers(module, "vocab_size")])
    special = {v for each in configs for name, v in vars(each).items() if "token" in name and isinstance(v, int)}
    plain = [identity for identity in range(min(vocabulary, 512)) if identity not in special] or [0]
    return torch.tensor(plain)[torch.randint(len(plain), (BATCH, length), generator=probe.generator())]


def _codebooks(module: Any) -> Iterator[int]:
    """How many ids each position may have: models of sound add an offset to the ids of each codebook."""
    sizes = {each.numel() for each in module.buffers() if not each.is_floating_point() and each.dim() == 1}
    yield from sorted(size for size in sizes if 1 < size <= _MOST_CODEBOOKS)


def _codes(ids: Tensor, count: int) -> Tensor:
    return ids[..., None].expand(*ids.shape, count).contiguous()


def _of_each_word(pictures: Inputs) -> Inputs:
    """What models want to know of each word: whether it is a part of a picture, and which pictures it sees.

    The first words see none (Idefics), and later ones one more after another.
    """
    known: Inputs = {name: torch.zeros(BATCH, LENGTH).long() for name in pictures if name.endswith("position_mask")}
    pixels = pictures.get("pixel_values")
    if "image_attention_mask" in pictures and pixels is not None and pixels.dim() == 5:
        seen = torch.arange(LENGTH)[:, None] > 3 * torch.arange(1, pixels.shape[1] + 1)
        known["image_attention_mask"] = seen.long().expand(BATCH, -1, -1)
    return known
