"""swiglu_mlp sites: modules that compute ``down(act(gate(x)) * up(x))`` with three linears of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from veomni_core.ops.swiglu_mlp import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.site import AttributeChange, Change, Kernel, Site

_HIDDEN, _INTERMEDIATE = 8, 12


class GatedMlpModules:
    """Finds gated MLPs by running their own code on tiny linears; the linears stay the modules that they are."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, tuple[str | None, str, tuple[str, ...]]] = {}
        for path, module in model.named_modules():
            linears = _linears(module)
            if not _is_gated_shape(linears):
                continue
            key = probe.behaviour(module)
            if key not in proofs:
                proofs[key] = _prove(module, linears)
            variant, evidence, roles = proofs[key]
            detail = dict(zip(("gate", "up", "down"), roles, strict=False))
            yield Site("swiglu_mlp", path, rule, variant, evidence, probe.parameter_dtype(module), detail)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        forward = _gated(kernel, site.detail["gate"], site.detail["up"], site.detail["down"])
        yield AttributeChange(module, "forward", MethodType(forward, module))


def _gated(kernel: Kernel, gate: str, up: str, down: str) -> Kernel:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        modules = self._modules
        return modules[down](kernel(modules[gate](x), modules[up](x)))  # type: ignore[misc,no-any-return]

    return forward


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: child
        for name, child in module._modules.items()
        if child is not None and hasattr(child, "in_features") and hasattr(child, "out_features")
    }


def _is_gated_shape(linears: dict[str, nn.Module]) -> bool:
    shapes = [(child.in_features, child.out_features) for child in linears.values()]
    return len(shapes) == 3 and any(
        shapes[i] == shapes[j] == shapes[k][::-1] for i, j, k in itertools.permutations(range(3))
    )


def _prove(module: nn.Module, linears: dict[str, nn.Module]) -> tuple[str | None, str, tuple[str, ...]]:
    with probe.seeded():
        twin = probe.bare_copy(module)
        twin._modules.update(module._modules)
        hidden = _hidden_size(linears)
        for name, child in linears.items():
            widths = (_HIDDEN, _INTERMEDIATE) if child.in_features == hidden else (_INTERMEDIATE, _HIDDEN)
            twin._modules[name] = nn.Linear(*widths, bias=getattr(child, "bias", None) is not None)
        twin.training = True
        x = probe.random(2, 3, _HIDDEN).requires_grad_()
        found, error = probe.attempt(lambda: type(module).forward(twin, x))
        if error:
            return None, error, ()
        if not isinstance(found, Tensor):
            return None, f"gives a {type(found).__name__}, expected a tensor", ()
        return _match(twin, tuple(linears), x, found)


def _hidden_size(linears: dict[str, nn.Module]) -> int:
    """The width that two linears take in and one gives out."""
    widths = [child.in_features for child in linears.values()]
    return max(widths, key=widths.count)  # type: ignore[arg-type,return-value]


def _match(
    twin: nn.Module, names: tuple[str, ...], x: Tensor, found: Tensor
) -> tuple[str | None, str, tuple[str, ...]]:
    misses = []
    for variant, contract in CONTRACTS.items():
        for gate, up, down in itertools.permutations(names):
            linear = {name: twin._modules[name] for name in names}
            if linear[gate].in_features != _HIDDEN or linear[up].in_features != _HIDDEN:  # type: ignore[union-attr]
                continue
            wanted = linear[down](contract.reference(linear[gate](x), linear[up](x)))  # type: ignore[misc]
            if probe.close(found, wanted) and probe.gradients_close(found, wanted, (x, *twin.parameters())):
                return variant, "its own code gave the reference's values and gradients", (gate, up, down)
            misses.append((probe.largest_miss(found, wanted), variant))
    by_how_much, nearest = min(misses)
    return None, f"no variant fits; the nearest, {nearest}, misses by {by_how_much:.1%}", ()
