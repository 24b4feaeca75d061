"""Whether an attention module computes the same under two interfaces, by running its own forward on random values.

A tower's module may split its heads at the bounds of pictures, pass the bounds on, or lay its heads out otherwise, as
its config names one interface or another. Masks and shapes don't show that. So the module's own code runs with its
eager function, and again as for the other interface with the contract's attention in the kernel's place.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_ops.attention import AttentionModule, standard
from veomni_ops.contract import as_tensors
from veomni_transformers.attention.config_changes import select_interface
from veomni_transformers.attention.kernel_lookup import TABLE
from veomni_transformers.attention.layer_forms import form_of
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import current_forward, with_globals
from veomni_transformers.proving.proof import ProvenOnce

_MOST_SCORES = 64_000_000  # of one call: larger ones would take gigabytes
_MOST_WEIGHTS = 200_000_000


@dataclass(frozen=True)
class ModuleRun:
    """One run of an attention module's forward: what it was given, under which interface."""

    path: str
    interface: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scores: list[int] = field(default_factory=list)  # how many numbers each of its attention calls has scores for


class ModuleValues:
    """Compares the runs of attention modules, each kind once. To be used within :func:`probe.seeded`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._differences: ProvenOnce[tuple[str, bool]] = ProvenOnce()

    def difference(self, eager: ModuleRun, other: ModuleRun, at_first: bool) -> tuple[str, bool]:
        """``(why, examined)``: what differs, empty if nothing; or why the module could not be run on values.

        ``at_first``: without a mask, the other interface aligns the first query with the first key.
        """
        module = self._model.get_submodule(eager.path)
        form = (form_of(module, -1), *map(_form, (eager, other)), at_first)
        return self._differences.of(form, lambda: _difference(module, eager, other, at_first))


def _difference(module: nn.Module, eager: ModuleRun, other: ModuleRun, at_first: bool) -> tuple[str, bool]:
    if max((*eager.scores, *other.scores), default=0) > _MOST_SCORES or _weights(module) > _MOST_WEIGHTS:
        return "it is too large to be run on values", False
    drawn: dict[Hashable, Tensor] = {}
    duplicate, failed = probe.attempt(partial(_random_copy, module, ""))
    results = []
    for run in () if failed else (eager, other):
        own, failed = probe.attempt(partial(_run, duplicate, module, run, drawn, at_first))
        if failed:
            break
        results.append(own)
    if failed:
        return failed, False
    found, wanted = results[1], results[0]
    if not probe.close(found, wanted):
        return f"its own forward gives values that miss eager's by {probe.largest_miss(found, wanted):.1%}", True
    leaves = [each for each in drawn.values() if each.requires_grad]
    if not probe.gradients_close(found, wanted, leaves):
        return "its own forward gives other gradients than eager's", True
    return "", True


def _run(duplicate: Any, module: nn.Module, run: ModuleRun, drawn: dict[Hashable, Tensor], at_first: bool) -> Tensor:
    config = copy.copy(vars(module)["config"])
    select_interface(config, run.interface)
    vars(duplicate)["config"] = config
    forward = with_globals(current_forward(module), {TABLE: _Reference(at_first)})
    args = [_random(value, place, drawn) for place, value in enumerate(run.args)]
    kwargs = {name: _random(value, name, drawn) for name, value in run.kwargs.items()}
    with torch.enable_grad(), probe.own_numbers():
        return as_tensors(forward(duplicate, *args, **kwargs))[0]


class _Reference:
    """Replaces transformers' table of attention functions: any name but eager's gives the contract's attention."""

    def __init__(self, at_first: bool) -> None:
        self._at_first = at_first

    def get_interface(self, name: str, default: Any) -> Any:
        return default if name == "eager" else self._attention

    def get(self, name: str, default: Any = None) -> Any:
        return self.get_interface(name, default)

    def __getitem__(self, name: str) -> Any:
        return self._attention

    def __contains__(self, name: str) -> bool:
        return True

    def _attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kw: Any) -> Any:
        given = kw.pop("attention_mask", None)
        causal = kw.get("is_causal")
        causal = getattr(module, "is_causal", None) if causal is None else causal
        mask = given if mask is None else mask
        if causal is None and (mask is None or mask.dim() != 4):
            raise TypeError("it gets no mask, and does not say whether it is causal (is_causal)")
        groups = query.shape[1] // max(key.shape[1], 1)
        of_call = AttentionModule(groups, is_causal=bool(causal), training=False, from_the_first_key=self._at_first)
        return standard(of_call, query, key, value, mask, **kw)


def _random(value: Any, place: Hashable, drawn: dict[Hashable, Tensor]) -> Any:
    """``value`` with random numbers, the same for both runs; masks, whole numbers and settings stay as they are."""
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            return value
        if "mask" in str(place):
            return value.float()
        if place not in drawn or drawn[place].shape != value.shape:
            if value.is_complex():
                drawn[place] = torch.polar(torch.ones(value.shape), probe.random(*value.shape))
            else:
                drawn[place] = probe.random(*value.shape).requires_grad_()
        return drawn[place]
    if type(value) in (tuple, list):
        return type(value)(_random(each, (place, number), drawn) for number, each in enumerate(value))
    return value


def _random_copy(module: nn.Module, path: str) -> nn.Module:
    if type(module).forward is nn.Linear.forward:
        return _Gathering(module)
    duplicate = probe.bare_copy(module)
    for name, value in module._parameters.items():
        if value is not None:
            # Gradients are compared where they leave the module; a bias of keys has one of rounding alone.
            made = probe.random(*value.shape, scale=(value.shape[-1] if value.dim() > 1 else 1) ** -0.5)
            duplicate._parameters[name] = nn.Parameter(made, requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            floating = buffer.is_floating_point()
            made = probe.random(*buffer.shape) if floating else torch.zeros(buffer.shape, dtype=buffer.dtype)
            duplicate._buffers[name] = made if floating or buffer.is_meta else buffer.detach().cpu().clone()
    for name, child in module._modules.items():
        duplicate._modules[name] = None if child is None else _random_copy(child, f"{path}.{name}")
    return duplicate.eval() if not path else duplicate


class _Gathering(nn.Module):
    """A linear whose every output is one of its inputs times a random number: as good for a comparison as any other."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        out, width = linear.weight.shape
        self.in_features, self.out_features = width, out
        self._inputs = torch.randint(width, (out,), generator=probe.generator())
        self._factors = probe.random(out)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self._inputs) * self._factors


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _form(run: ModuleRun) -> Hashable:
    return run.interface, tuple(map(_shape, run.args)), tuple((name, _shape(v)) for name, v in run.kwargs.items())


def _shape(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        small = tuple(value.flatten().tolist()) if not value.is_floating_point() and value.numel() <= 64 else ()
        return tuple(value.shape), value.dtype, small
    if type(value) in (tuple, list):
        return tuple(map(_shape, value))
    return value if isinstance(value, bool | int | float | str | None) else id(value)
