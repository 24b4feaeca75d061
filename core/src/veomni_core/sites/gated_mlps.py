"""swiglu_mlp sites: modules that compute ``down(act(gate(x)) * up(x))`` with linears of their own.

Gate and up may be two linears or the halves of one. The linears stay the modules that they are, so that LoRA, tensor
parallel and quantised linears keep working.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from veomni_core.changes import Change, ForwardChange
from veomni_core.ops.contract import dtype_name
from veomni_core.ops.swiglu_mlp import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.site import Kernel, Site

_HIDDEN, _INTERMEDIATE = 8, 12
Modules = dict[str, Any]
Layout = tuple[str, ...]


@dataclass(frozen=True)
class _Proof:
    """What was found out about a module; ``examined`` as in :class:`Site`."""

    variant: str | None
    evidence: str
    layout: Layout = ()
    examined: bool = True


class GatedMlpModules:
    """Finds gated MLPs by running their own code on tiny linears."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, _Proof | None] = {}
        for path, module in model.named_modules():
            linears = _linears(module)
            if not _is_gated_shape(linears) or not _takes_one_tensor(module):
                continue
            if why_not := _mixed_dtypes(linears):
                yield Site("swiglu_mlp", path, rule, None, why_not, probe.parameter_dtype(module))
                continue
            key = probe.behaviour(module)
            if key not in proofs:
                proofs[key] = _prove(module, linears)
            proof = proofs[key]
            if proof is not None:
                dtype, detail = probe.parameter_dtype(module), {"layout": list(proof.layout)}
                site = Site("swiglu_mlp", path, rule, proof.variant, proof.evidence, dtype, detail)
                yield replace(site, examined=proof.examined)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        yield ForwardChange(module, _gated(kernel, tuple(site.detail["layout"])))


def _gated(kernel: Kernel, layout: Layout) -> Kernel:
    """A forward for ``(gate, up, down)``, or for ``(packed, down)`` whose first half is the gate."""

    def separate(self: nn.Module, x: Tensor) -> Tensor:
        modules: Modules = self._modules
        gate, up, down = layout
        return modules[down](kernel(modules[gate](x), modules[up](x)))  # type: ignore[no-any-return]

    def packed(self: nn.Module, x: Tensor) -> Tensor:
        modules: Modules = self._modules
        both, down = layout
        gate, up = modules[both](x).chunk(2, dim=-1)
        return modules[down](kernel(gate, up))  # type: ignore[no-any-return]

    return separate if len(layout) == 3 else packed


def _linears(module: nn.Module) -> dict[str, Any]:
    return {
        name: child
        for name, child in module._modules.items()
        if child is not None and hasattr(child, "in_features") and hasattr(child, "out_features")
    }


def _mixed_dtypes(linears: dict[str, Any]) -> str:
    """Which floating-point dtypes the linears have, where they have several; else an empty string.

    Such a module casts between its linears (T5 v1.1 in float16 keeps ``wo`` in float32), and a bound forward does not.
    """
    weights = {name: getattr(linear, "weight", None) for name, linear in linears.items()}
    dtypes = {
        name: dtype_name(weight.dtype)
        for name, weight in weights.items()
        if isinstance(weight, Tensor) and weight.is_floating_point()
    }
    if len(set(dtypes.values())) < 2:
        return ""
    found = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
    return f"its linears have different dtypes ({found}), and a bound forward does not cast between linears"


def _is_gated_shape(linears: dict[str, Any]) -> bool:
    return any(_layouts(linears))


def _layouts(linears: dict[str, Any]) -> Iterator[Layout]:
    """The roles that the linears' shapes allow."""
    shape = {name: (child.in_features, child.out_features) for name, child in linears.items()}
    if len(linears) == 3:
        for gate, up, down in itertools.permutations(linears):
            if shape[gate] == shape[up] == shape[down][::-1]:
                yield gate, up, down
    if len(linears) == 2:
        for both, down in itertools.permutations(linears):
            if shape[both] == (shape[down][1], 2 * shape[down][0]):
                yield both, down


def _takes_one_tensor(module: nn.Module) -> bool:
    """Whether the forward asks for one argument, as an MLP's does and an attention's doesn't."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) == 1


def _prove(module: nn.Module, linears: dict[str, Any]) -> _Proof | None:
    """What the module computes; ``None`` for square linears that don't run alone: queries, keys and values."""
    layouts = list(_layouts(linears))
    with probe.seeded():
        twin = probe.bare_copy(module)
        twin._modules.update(module._modules)
        for name, (inputs_width, outputs_width) in _tiny_shapes(linears, layouts[0]).items():
            bias = getattr(linears[name], "bias", None) is not None
            twin._modules[name] = nn.Linear(inputs_width, outputs_width, bias=bias)
        twin.training = True
        inputs = [probe.random(2, 3, _HIDDEN, scale=scale).requires_grad_() for scale in probe.SCALES]
        own, error = probe.attempt(lambda: [type(module).forward(twin, x) for x in inputs])
        if error:
            square = all(child.in_features == child.out_features for child in linears.values())
            return None if square else _without_a_run(module, linears, error)
        if not all(isinstance(found, Tensor) for found in own):
            return _Proof(None, f"gives a {type(own[0]).__name__}, expected a tensor")
        return _match(twin, layouts, inputs, own)


def _tiny_shapes(linears: dict[str, Any], layout: Layout) -> dict[str, tuple[int, int]]:
    *first, down = layout
    is_square = linears[down].in_features == linears[down].out_features
    inner = _HIDDEN if is_square else _INTERMEDIATE
    packed = 2 if len(first) == 1 else 1
    return {**dict.fromkeys(first, (_HIDDEN, packed * inner)), down: (inner, _HIDDEN)}


def _without_a_run(module: nn.Module, linears: dict[str, Any], error: str) -> _Proof:
    children = {name: child for name, child in module.named_children() if name not in linears}
    others = [name for name, child in children.items() if any(True for _ in child.parameters())]
    if others:
        return _Proof(None, f"besides its linears it needs {', '.join(others)}: with tiny linears alone, {error}")
    return _Proof(None, error, examined=False)


def _match(twin: nn.Module, layouts: list[Layout], inputs: list[Tensor], own: list[Tensor]) -> _Proof:
    misses = []
    for variant, contract in CONTRACTS.items():
        for layout in layouts:
            miss = max(map(partial(_miss, twin, _gated(contract.reference, layout)), inputs, own))
            if miss == 0.0:
                return _Proof(variant, "its own code gave the reference's values and gradients", layout)
            misses.append((miss, variant))
    by_how_much, nearest = min(misses)
    return _Proof(None, f"no variant fits; the nearest, {nearest}, misses by {by_how_much:.2%}")


def _miss(twin: nn.Module, bound: Kernel, x: Tensor, found: Tensor) -> float:
    wanted, error = probe.attempt(partial(bound, twin, x))
    if error:  # roles that the real shapes allow and the tiny ones don't
        return float("inf")
    return probe.miss(found, wanted, (x, *twin.parameters()))
