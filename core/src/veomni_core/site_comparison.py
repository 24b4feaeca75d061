"""Runs one module on the inputs that it gets within its model, and compares two such runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.ops.contract import Contract, Tolerance, dtype_name

_SEED = 20  # any; both runs must draw the same
_TOKENS = (2, 9)
# The losses that a model's output may hold; where it holds one, it is what the site changes.
_LOSSES = ("loss", "aux_loss")


@dataclass(frozen=True)
class RecordedCall:
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What a module gave: its results and the gradients by name, or why it could not be run."""

    results: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def of(cls, module: nn.Module, call: RecordedCall) -> Run:
        """Run ``module`` forward and backward on copies of the recorded arguments, with the same random numbers."""
        leaves: dict[str, Tensor] = {}
        try:
            torch.manual_seed(_SEED)
            args = [_fresh(value, f"input {position}", leaves) for position, value in enumerate(call.args)]
            kwargs = {name: _fresh(value, name, leaves) for name, value in call.kwargs.items()}
            with torch.enable_grad():
                results = dict(_results(module(*args, **kwargs)))
                leaves.update(_own_parameters(module))
                return cls({name: value.detach() for name, value in results.items()}, _gradients(results, leaves))
        except Exception as error:  # foreign code, called on its own
            return cls(problem=f"{type(error).__name__}: {str(error)[:200]}")


def compare(own: Run, bound: Run, contract: Contract) -> str:
    """How ``bound`` differs from ``own``, by more than the contract lets each of the two differ from the exact result.

    The two may stand at opposite ends of what is allowed, so their distance is held to twice that.
    """
    for which, mine, theirs, allowed in (
        ("", own.results, bound.results, contract.values),
        ("the gradient of ", own.gradients, bound.gradients, contract.gradients),
    ):
        for name, wanted in mine.items():
            found = theirs.get(name)
            what = f"{which}{name}"
            if (found is None) != (wanted is None):
                return f"{what} is {'missing' if found is None else 'given, and its own code gives none'}"
            if found is None or wanted is None:
                continue
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                return f"{what} is {_form(found)}, its own code gives {_form(wanted)}"
            tolerance = allowed.get(dtype_name(wanted.dtype))
            if tolerance is not None and (problem := _distance(found, wanted, tolerance)):
                return f"{what} is off: {problem}"
    return ""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put attributes, modes, hooks, buffers and random states back, whatever is run within.

    A first forward leaves traces of its own: transformers then installs the hooks that record a model's outputs.
    """
    attributes = [(module, dict(vars(module)), _hooks(module)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
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


def _hooks(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {name: dict(value) for name, value in vars(module).items() if "hooks" in name and isinstance(value, dict)}


def recorded_calls(model: nn.Module, paths: set[str]) -> tuple[dict[str, RecordedCall], str]:
    """What the modules at ``paths`` are called with in one forward of ``model`` in training, and why none could be."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return {}, "the model has no weights, it is on the meta device"
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        return {}, "the model's parameters are sharded"
    inputs = _inputs(model)
    if inputs is None:
        return {}, "the model has no dummy_inputs and no vocab_size in its config, so nothing is known to run it on"
    calls: dict[str, RecordedCall] = {}

    def record(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, RecordedCall(_kept(args), _kept(kwargs)))

        return hook

    handles = [model.get_submodule(path).register_forward_pre_hook(record(path), with_kwargs=True) for path in paths]
    if isinstance(embeddings := _input_embeddings(model), nn.Module):
        # As in training, also where all that lies before a site is frozen; angles and masks need no gradient then.
        handles.append(embeddings.register_forward_hook(lambda module, args, result: result.requires_grad_()))
    model.train()
    torch.manual_seed(_SEED)
    why_none = ""
    try:
        with torch.enable_grad():
            model(**inputs)
    except Exception as error:  # foreign code on inputs that are only likely to fit
        why_none = (
            "" if calls else f"the model can't be run on a few tokens: {type(error).__name__}: {str(error)[:200]}"
        )
    finally:
        for handle in handles:
            handle.remove()
    return calls, why_none


def _inputs(model: Any) -> dict[str, Any] | None:
    """A few tokens, with labels where the model takes them."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    config: Any = getattr(model, "config", None)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) if hasattr(config, "get_text_config") else None
    given = getattr(model, "dummy_inputs", None)
    if not isinstance(given, dict) and not vocabulary:
        return None
    torch.manual_seed(_SEED)
    names = inspect.signature(type(model).forward).parameters
    inputs = {name: value for name, value in (given or {}).items() if name in names}
    if vocabulary and set(inputs) <= {"input_ids"}:
        inputs = {"input_ids": torch.randint(vocabulary, _TOKENS)}
        if "labels" in names and getattr(model, "get_output_embeddings", lambda: None)() is not None:
            inputs["labels"] = inputs["input_ids"]
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _input_embeddings(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # no transformers model, or one that reads no tokens
        return None


def _kept(value: Any) -> Any:
    """``value`` as it is now, whatever the forward does to it later."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_kept(each) for each in value)
    return {name: _kept(each) for name, each in value.items()} if type(value) is dict else value


def _fresh(value: Any, name: str, leaves: dict[str, Tensor]) -> Any:
    """A copy of an argument; tensors that required gradients become leaves, whose gradients are compared."""
    if isinstance(value, Tensor):
        copied = value.detach().clone().requires_grad_(value.requires_grad)
        if value.requires_grad:
            leaves[name] = copied
        return copied
    if type(value) in (tuple, list):
        return type(value)(_fresh(each, f"{name}[{position}]", leaves) for position, each in enumerate(value))
    return (
        {key: _fresh(each, f"{name}[{key!r}]", leaves) for key, each in value.items()} if type(value) is dict else value
    )


def _results(result: Any) -> Iterator[tuple[str, Tensor]]:
    losses = [name for name in _LOSSES if isinstance(getattr(result, name, None), Tensor)]
    if losses:
        yield from ((name, getattr(result, name)) for name in losses)
    elif isinstance(result, Tensor):
        yield "the result", result
    elif isinstance(result, dict):
        yield from ((name, value) for name, value in result.items() if isinstance(value, Tensor))
    elif isinstance(result, (tuple, list)):
        yield from ((f"result {position}", value) for position, value in enumerate(result) if isinstance(value, Tensor))


def _own_parameters(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The module's own parameters; of a whole model its output projection's, where its losses begin."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    for name, parameter in (head or module).named_parameters(recurse=False):
        if parameter.requires_grad:
            yield name, parameter


def _gradients(results: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    reached = [result for result in results.values() if result.requires_grad]
    if not reached or not leaves:
        return dict.fromkeys(leaves)
    generator = torch.Generator().manual_seed(_SEED)
    upstream = [torch.randn(result.shape, generator=generator).to(result) for result in reached]
    found = torch.autograd.grad(reached, list(leaves.values()), upstream, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _distance(found: Tensor, wanted: Tensor, allowed: Tolerance) -> str:
    found, wanted = found.double(), wanted.double()
    error, size = (found - wanted).abs(), wanted.abs()
    if not wanted.numel() or not error.any():
        return ""
    scale = size + size.square().mean().sqrt()
    element, norm = float((error / scale).max()), float(error.norm() / wanted.norm())
    for measure, value, limit in (("element", element, 2 * allowed.element), ("norm", norm, 2 * allowed.norm)):
        if not value <= limit:  # NaN too
            return f"{measure} error {value:.1e}, allowed {limit:.1e}"
    return ""


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {dtype_name(tensor.dtype)}"
