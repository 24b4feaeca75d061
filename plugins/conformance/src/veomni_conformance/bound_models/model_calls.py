"""Records the arguments of a model's modules in one forward on a few tokens, and leaves the model unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from veomni_ops.own_random_numbers import OwnRandomNumbers

SEED = 20  # arbitrary, but the same in both runs of a comparison
_TOKENS = (2, 9)  # [batch, sequence]


@dataclass(frozen=True)
class RecordedCall:
    """Copies of the arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore attributes, train/eval modes, hooks and buffers on exit. Random numbers are not the process's.

    Hooks are included because in a model's first forward transformers installs some, to record outputs. Kernels that
    draw by themselves on a GPU, and not by an operator of torch, still advance the process's generator there.
    """
    attributes = [(module, dict(vars(module)), _hooks(module)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    with OwnRandomNumbers(SEED):
        try:
            yield
        finally:
            for module, before, hooks in attributes:
                vars(module).clear()
                vars(module).update(before)
                for name, entries in hooks.items():
                    vars(module)[name].clear()
                    vars(module)[name].update(entries)
            with torch.no_grad():
                for buffer, values in buffers:
                    if not torch.equal(buffer, values):
                        buffer.copy_(values)


def draw_again(states: Mapping[torch.device, Tensor] | None = None) -> None:
    """Within :func:`undisturbed`, draw the same random numbers again, or those that follow ``states`` of generators."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, OwnRandomNumbers):
            mode.begin_again(states)


def _hooks(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {name: dict(value) for name, value in vars(module).items() if "hooks" in name and isinstance(value, dict)}


def recorded_calls(model: nn.Module, paths: set[str]) -> tuple[dict[str, RecordedCall], str]:
    """Run ``model`` once in training mode and record the first call of each module in ``paths``.

    Returns:
        The calls by module path, and why there are none; the reason is empty if there are some.
    """
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        return {}, "the model's parameters are sharded"
    inputs = _inputs(model)
    if inputs is None:
        return {}, "the model has no dummy_inputs and no vocab_size in its config, so there are no inputs to run it on"
    calls: dict[str, RecordedCall] = {}

    def record(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, RecordedCall(kept(args), kept(kwargs)))

        return hook

    handles = [model.get_submodule(path).register_forward_pre_hook(record(path), with_kwargs=True) for path in paths]
    if isinstance(embeddings := _input_embeddings(model), nn.Module):
        # Activations require gradients, as in training, even if everything before a site is frozen.
        handles.append(embeddings.register_forward_hook(lambda module, args, result: result.requires_grad_()))
    model.train()
    draw_again()
    why_none = ""
    try:
        with torch.enable_grad():
            model(**inputs)
    except Exception as error:  # the model may raise anything: the inputs are a guess
        why_none = (
            "" if calls else f"the model can't be run on a few tokens: {type(error).__name__}: {str(error)[:200]}"
        )
    finally:
        for handle in handles:
            handle.remove()
    return calls, why_none


def _inputs(model: Any) -> dict[str, Any] | None:
    """The model's ``dummy_inputs``, or else a few random tokens, with labels if the model takes them."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    config: Any = getattr(model, "config", None)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) if hasattr(config, "get_text_config") else None
    given = getattr(model, "dummy_inputs", None)
    if not isinstance(given, dict) and not vocabulary:
        return None
    draw_again()
    names = inspect.signature(type(model).forward).parameters
    inputs = {name: value for name, value in (given or {}).items() if name in names}
    if vocabulary and set(inputs) <= {"input_ids"}:
        inputs = {"input_ids": torch.randint(vocabulary, _TOKENS)}
        if "labels" in names and getattr(model, "get_output_embeddings", lambda: None)() is not None:
            inputs["labels"] = inputs["input_ids"]
    if "use_cache" in names:  # as in training; what a run writes into a cache would be read by the next one
        inputs["use_cache"] = False
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _input_embeddings(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # not a transformers model, or one without token inputs
        return None


def kept(value: Any) -> Any:
    """A copy of ``value``, since the forward may write into it later."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(kept(each) for each in value)
    return {name: kept(each) for name, each in value.items()} if type(value) is dict else value
