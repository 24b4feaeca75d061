"""Leaves masks out of compiled steps whose rows are not packed, as transformers does in eager steps.

transformers finds packed rows by the values of ``position_ids``. It can't read them while a graph is traced, so every
row counts as packed there, and attention gets a mask: with sdpa on an H100 that took 25.6 in place of 8.0 ms of a step
(docs/benchmarks/train_steps.md). But a decoder that is given neither positions nor a mask numbers its rows by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.sites.walk import named_modules
from veomni_transformers.packed.mask_calls import SLIDING, mask_builders, mask_calls
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import current_forward, with_globals

Function = Callable[..., Any]
_ROWS, _LENGTH = 2, 5
# What a caller may give, beside flags and numbers, for the decoder to number its rows by itself.
_TOKENS = {"input_ids", "inputs_embeds", "num_items_in_batch"}
# What the builder of a mask that depends on lengths alone is given; embeddings have two names.
_OF_LENGTHS = {"config", "inputs_embeds", "input_embeds", "cache_position", "position_ids", "layer_idx"}


def without_masks_of_plain_rows(model: nn.Module, owner: str) -> Iterator[Change]:
    """The changes of the decoders that build masks for the config of ``owner``, under a kernel that takes sdpa's."""
    config = model.get_submodule(owner).config
    for _, module in named_modules(model):
        if vars(module).get("config") is not config:
            continue
        forward = current_forward(module)
        proven = {
            name: partial(_unless_plain, build, name == SLIDING)
            for name, build in _given_consecutive_positions(module, dict(mask_builders(forward)))
        }
        if proven:
            yield ForwardChange(module, _forward(forward, with_globals(forward, proven)))


def _given_consecutive_positions(module: Any, builders: Mapping[str, Function]) -> Iterator[tuple[str, Function]]:
    """Those of ``builders`` that the forward, given embeddings alone, calls for positions that rise by one.

    It runs until its first layer. A builder that is called without keywords is left as it is.
    """
    if not builders:
        return
    embeddings = torch.zeros(_ROWS, _LENGTH, getattr(module.config, "hidden_size", 1))
    calls = mask_calls(module, builders, {"inputs_embeds": embeddings})
    for name, build in builders.items():
        rising, _ = probe.attempt(partial(_rising, calls[name]))
        if rising:
            yield name, build


def _rising(calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> bool:
    """Whether there are calls, and the positions of all rise by one; raises where these are fake tensors."""
    positions = [call.get("position_ids") for args, call in calls if not args]
    rise = [each is None or bool((each.diff(dim=-1) == 1).all()) for each in positions]
    return len(calls) == len(rise) > 0 and all(rise)


def _forward(own: Function, of_plain_rows: Function) -> Function:
    @wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and _numbers_its_rows(args, kwargs):
            return of_plain_rows(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    return forward


def _numbers_its_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    others = [name for name, value in kwargs.items() if not isinstance(value, bool | int | str | None)]
    return all(arg is None for arg in args[1:]) and _TOKENS.issuperset(others)


def _unless_plain(build: Function, sliding: bool, **call: Any) -> Tensor | None:
    """What ``build`` gives for rows that are not packed: nothing where the kernel's own causal mask is the same.

    Queries and keys are as many, so that it makes no difference at which end the kernel aligns them.
    """
    given = [name for name, value in call.items() if value is not None]
    config = call["config"]
    if not _OF_LENGTHS.issuperset(given) or not getattr(config, "is_causal", True):
        mask: Tensor | None = build(**call)
        return mask
    embeddings = call["inputs_embeds"] if "inputs_embeds" in call else call["input_embeds"]
    if sliding and embeddings.shape[1] >= config.sliding_window:
        mask = build(**{**call, "position_ids": None})
        return mask
    return None
