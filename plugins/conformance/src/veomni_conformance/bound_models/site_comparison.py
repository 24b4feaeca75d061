"""Runs one module on inputs that were recorded in its model, and compares two such runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from veomni_conformance.bound_models.model_calls import SEED, RecordedCall, draw_again
from veomni_ops.contract import Contract, Tolerance, dtype_name

# If a model's output has one of these losses, the losses are compared, since they are what such a site changes.
_LOSSES = ("loss", "aux_loss")
# The most that the own code's rounding allows. Where a convolution is bound in a tiny qwen3_next, the layer's own delta
# rule rounds the gradient of ``dt_bias`` by up to 3e-4, with the kernel and without.
_ROUNDING = 5e-4


@dataclass(frozen=True)
class Run:
    """The results and gradients of one run of a module, by name; or in ``problem``, why it could not be run."""

    results: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        call: RecordedCall,
        autocast: str | None = None,
        gradients: bool = True,
        set_random_states: Callable[[], None] = draw_again,
        run: Callable[..., Any] | None = None,
    ) -> Run:
        """Run ``module`` forward, and backward for ``gradients``, on copies of the recorded arguments.

        ``set_random_states`` is called before, so that runs can be compared. ``run`` is called in place of the module,
        where its forward is not what is compared.
        """
        leaves: dict[str, Tensor] = {}
        try:
            set_random_states()
            args = [_fresh(value, f"input {position}", leaves) for position, value in enumerate(call.args)]
            kwargs = {name: _fresh(value, name, leaves) for name, value in call.kwargs.items()}
            with torch.set_grad_enabled(gradients):
                with autocast_on(module, autocast):
                    results = dict(results_of((run or module)(*args, **kwargs)))
                leaves.update(_own_parameters(module))
                found = {name: value.detach() for name, value in results.items()}
                return cls(found, _gradients(results, leaves) if gradients else {})
        except Exception as error:  # the module's code may raise anything when it is called on its own
            return cls(problem=f"{type(error).__name__}: {str(error)[:200]}")

    @classmethod
    def that_gave(cls, result: Any) -> Run:
        """The run that gave ``result``. Its gradients are not known."""
        return cls({name: value.detach() for name, value in results_of(result)})

    def without_gradients(self) -> Run:
        """The same results alone."""
        return replace(self, gradients={})


def autocast_on(module: nn.Module, dtype: str | None) -> AbstractContextManager[Any]:
    """Autocast to ``dtype`` on the device of ``module``; a no-op for ``None``."""
    if dtype is None:
        return nullcontext()
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    return torch.autocast(device, getattr(torch, dtype))


def compare(
    own: Run, bound: Run, contract: Contract, autocast: str | None = None, exact: Callable[[], Run] | None = None
) -> str:
    """How ``bound`` differs from ``own`` by more than the contract allows; empty if it doesn't.

    Each of the two may differ from the exact result by the contract's tolerance, in opposite directions, so their
    difference may be twice that. Under ``autocast`` the tolerances are those of its dtype, also for float32 results:
    they were computed from values that were rounded to it.

    Where they differ by more, ``exact`` runs the module's own code in float64. A result of ``bound`` that is as close
    to that as it should be to ``own`` is right. So is one that is at most twice as far as ``own`` is, since other code
    of the module rounds in both; of that rounding ``_ROUNDING`` counts, so that no wrong kernel hides behind bad code.
    """
    in_float64 = cache(exact or partial(Run, problem="it was not asked for"))
    for which, of, allowed in (
        ("", attrgetter("results"), contract.values),
        ("the gradient of ", attrgetter("gradients"), contract.gradients),
    ):
        for name, wanted in of(own).items():
            found = of(bound).get(name)
            what = f"{which}{name}"
            if (found is None) != (wanted is None):
                return f"{what} is {'missing' if found is None else 'given, and its own code gives none'}"
            if found is None or wanted is None:
                continue
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                return f"{what} is {_form(found)}, its own code gives {_form(wanted)}"
            tolerance = allowed.get(autocast or dtype_name(wanted.dtype))
            if tolerance is None or not (problem := _problem(_errors(found, wanted), tolerance)):
                continue
            exactly = of(in_float64()).get(name)
            if exactly is None or exactly.shape != found.shape:
                return f"{what} is off: {problem}"
            if _problem(_errors(found, exactly), tolerance, _errors(wanted, exactly)):
                return f"{what} is off: {problem}; so it is from what its own code computes in float64"
    return ""


def _fresh(value: Any, name: str, leaves: dict[str, Tensor]) -> Any:
    """A copy of an argument. Tensors that require gradients become leaves and are added to ``leaves``."""
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


def results_of(result: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a module's call gave, by name; of a model's output that has losses, the losses alone."""
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
    """The module's own parameters; for a whole model those of its output projection, from which the losses come."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    for name, parameter in (head or module).named_parameters(recurse=False):
        if parameter.requires_grad:
            yield name, parameter


def _gradients(results: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    reached = [result for result in results.values() if result.requires_grad]
    if not reached or not leaves:
        return dict.fromkeys(leaves)
    generator = torch.Generator().manual_seed(SEED)
    upstream = [torch.randn(result.shape, generator=generator).to(result) for result in reached]
    found = torch.autograd.grad(reached, list(leaves.values()), upstream, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _errors(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The largest error of an element, and that of the norm, both relative."""
    found, wanted = found.double(), wanted.double()
    error, size = (found - wanted).abs(), wanted.abs()
    if not wanted.numel() or not error.any():
        return 0.0, 0.0
    return float((error / (size + size.square().mean().sqrt())).max()), float(error.norm() / wanted.norm())


def _problem(errors: tuple[float, float], allowed: Tolerance, rounding: tuple[float, float] = (0.0, 0.0)) -> str:
    """Which of ``errors`` is more than twice what the contract allows, and what the own code's ``rounding`` allows."""
    limits = (allowed.element, allowed.norm)
    for measure, error, limit, own in zip(("element", "norm"), errors, limits, rounding, strict=True):
        if not error <= 2 * max(limit, min(own, _ROUNDING)):  # NaN too
            return f"{measure} error {error:.1e}, allowed {2 * limit:.1e}"
    return ""


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {dtype_name(tensor.dtype)}"
