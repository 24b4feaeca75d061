"""What a job says about the towers of a model of images, video or audio: which are frozen, and which are adapted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from veomni_core.errors import ConfigError
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.schema import Job, LoraSection
from veomni_trainer.job.source_keys import PROCESSOR_FILES
from veomni_transformers.towers.host_metadata import gives_positions
from veomni_transformers.towers.parts import KINDS, media_kinds, tower_of, towers

_TEXT = "text"


def settle_media(job: Job, tokenizer: Tokenizer, model: Any) -> None:
    """Let the job's rows have the media that ``model`` takes, if there is a processor of them.

    Raises:
        ConfigError: the job sets the sizes of images, and the model takes none.
    """
    kinds = media_kinds(model)
    if job.data.image_pixels and "image" not in kinds:
        raise ConfigError(f"data.image_pixels: {type(model).__name__} takes no images; leave it out")
    if tokenizer.processor is None:
        if kinds:
            tokenizer.no_media = (
                f"{job.data.tokenizer or job.model.weights or 'bytes'} has no processor of media "
                f"({', '.join(PROCESSOR_FILES)}), which the model was trained with; copy its files beside the "
                "tokenizer's"
            )
    elif kinds:
        ids = {f"{kind}_{name}": kind for kind in kinds for name in ("token_index", "token_id")}
        found = {kind: getattr(model.config, name) for name, kind in ids.items() if hasattr(model.config, name)}
        tokenizer.processor.taken = dict.fromkeys(kinds) | found
        tokenizer.processor.gives_positions = gives_positions(model)
    else:
        tokenizer.processor = None
        tokenizer.no_media = (
            f"{type(model).__name__} takes text alone; train a model that has a tower for it, or leave it out"
        )


def freeze(model: nn.Module, kinds: Iterable[str]) -> None:
    """Take the parameters of the towers ``kinds`` out of training; ``text`` is all that is in no tower.

    Raises:
        ConfigError: the model has no such tower, or nothing would be left to train.
    """
    kinds = list(kinds)
    if not kinds:
        return
    found = _check(model, kinds, "train.freeze")
    for name, parameter in model.named_parameters():
        if (tower_of(found, name) or _TEXT) in kinds:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"train.freeze: [{', '.join(kinds)}] leaves nothing to train; take one out")


def excluded_modules(model: nn.Module, lora: LoraSection) -> str | list[str] | None:
    """PEFT's ``exclude_modules``: the job's, and of ``all-linear`` the towers that ``lora.towers`` doesn't name.

    Raises:
        ConfigError: the model has no such tower, or ``lora.towers`` stands beside names of modules.
    """
    theirs = lora.exclude_modules
    if lora.towers:
        _check(model, lora.towers, "lora.towers")
        if lora.target_modules != "all-linear":
            raise ConfigError("lora.towers is for target_modules: all-linear; names of modules hold in all towers")
    found = towers(model) if lora.target_modules == "all-linear" else {}
    left = [re.escape(path) for kind in found if kind not in lora.towers for path in found[kind]]
    if not left:
        return theirs
    ways = [rf"({'|'.join(left)})(\..*)?"]
    # Beside experts PEFT keeps the ends of names: "0" of a linear in a tower would name the decoder's first layer too.
    lists = [(path, each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    linear = [path for path, each in lists if any(isinstance(part, nn.Linear) for part in each)]
    if linear:
        others = [re.escape(path) for path, _ in lists if path not in linear]
        ways.append(rf"({'|'.join(others)})\.\d+")
    if theirs:
        ways += [theirs] if isinstance(theirs, str) else [rf"(.*\.)?({'|'.join(map(re.escape, theirs))})"]
    return "|".join(f"({way})" for way in ways)


def _check(model: nn.Module, kinds: Iterable[str], key: str) -> dict[str, tuple[str, ...]]:
    found = towers(model)
    for kind in kinds:
        if kind not in (*found, _TEXT):
            here = ", ".join(each for each in KINDS if each in found) or "none"
            raise ConfigError(
                f"{key}: {type(model).__name__} has no part {kind!r}; beside its text decoder it has: {here}"
            )
    return found
