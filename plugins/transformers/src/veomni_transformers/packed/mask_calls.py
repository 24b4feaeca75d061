"""With what a decoder calls the functions that build its masks, seen by running its forward up to its first layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals

Function = Callable[..., Any]
CAUSAL, SLIDING = "create_causal_mask", "create_sliding_window_causal_mask"


def mask_builders(forward: Function) -> Iterator[tuple[str, Function]]:
    """Those of transformers' functions that build causal masks which ``forward`` calls, by the name of the global."""
    from transformers import masking_utils

    for name, value in global_functions(forward):
        if name in (CAUSAL, SLIDING) and value is getattr(masking_utils, name):
            yield name, value


def mask_calls(
    decoder: nn.Module, builders: Mapping[str, Function], inputs: Mapping[str, Any]
) -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The positional and the named arguments with which the forward of ``decoder`` calls each of ``builders``."""
    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {name: [] for name in builders}

    def record(name: str, *args: Any, **kwargs: Any) -> None:
        calls[name].append((args, kwargs))

    run = with_globals(current_forward(decoder), {name: partial(record, name) for name in builders})
    with torch.no_grad():
        probe.attempt(lambda: run(probe.without_layers(decoder, lambda *_: _Stop()), **inputs, use_cache=False))
    return calls


class _Stop(nn.Module):
    def forward(self, *_: Any, **__: Any) -> None:
        raise InterruptedError
