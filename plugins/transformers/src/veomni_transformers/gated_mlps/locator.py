"""swiglu_mlp sites: modules that compute ``down(act(gate(x)) * up(x))`` with linears of their own.

Gate and up may be two linears or the halves of one. A bound forward still calls the linears as modules, so that LoRA,
tensor parallel and quantised linears keep working.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_ops.contract import Contract, dtype_name
from veomni_ops.swiglu_mlp import CONTRACTS
from veomni_transformers.changes.bypassed_children import with_children_as_proven
from veomni_transformers.changes.guard_change import GuardChange
from veomni_transformers.engine.engine_layout import EngineLayout, parts
from veomni_transformers.engine.layout import refused
from veomni_transformers.forwards.gated_mlps import Layout, over_linears
from veomni_transformers.forwards.signatures import with_own_signature
from veomni_transformers.gated_mlps.proof import prove_mlp
from veomni_transformers.proving import probe
from veomni_transformers.proving.code_reading import bypassed, guarded_names
from veomni_transformers.proving.module_locator import ModuleLocator, refuse_empty
from veomni_transformers.proving.proof import Proof

# The engine's styles of the linears into the activation: each rank gets a part of their output, or the whole.
_DIVIDING = {"colwise", "packed_colwise"}
_GATHERING = {"", "colwise_gather_output", "colwise_rep"}
_SPLITTING = {"rowwise_split_input", "rowwise_rep"}  # of a linear out of it that is given the whole


class GatedMlpModules(ModuleLocator):
    """Finds gated MLPs by running their own code on tiny linears.

    A subclass with other ``contracts`` proves modules that compute those variants.

    Example:
        >>> import torch
        >>> from dataclasses import replace
        >>> def squared_relu(gate, up):
        ...     return torch.relu(gate).square() * up
        >>> CONTRACT = replace(CONTRACTS["standard"], variant="squared_relu", reference=squared_relu)
        >>> class SquaredReluMlps(GatedMlpModules):
        ...     contracts = {"squared_relu": CONTRACT}
        >>> class Mlp(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        ...
        ...     def forward(self, x):
        ...         return self.down(self.up(x) * torch.relu(self.gate(x)).square())
        >>> for locator in (GatedMlpModules(), SquaredReluMlps()):
        ...     [site] = locator.find(nn.Sequential(Mlp()), "MLPs with a squared ReLU")
        ...     print(site.path, site.variant, site.detail.get("layout"))
        0 None None
        0 squared_relu ['gate', 'up', 'down']
    """

    op_name = "swiglu_mlp"
    contracts: Mapping[str, Contract] = CONTRACTS

    def __init__(self) -> None:
        super().__init__()
        refuse_empty(self, "contracts", "variant: Contract(...)")

    def is_candidate(self, module: nn.Module) -> bool:
        return any(True for _ in _layouts(_linears(module))) and _takes_one_tensor(module)

    def prove(self, module: nn.Module) -> Proof | None:
        linears = _linears(module)
        if why_not := _mixed_dtypes(linears):
            return Proof(None, why_not)
        return prove_mlp(module, self.readings, linears, list(_layouts(linears)), self.contracts)

    def key(self, module: nn.Module) -> Hashable:
        return probe.behaviour(module, self.readings.of(module).names, _linears(module))

    def sizes(self, module: nn.Module) -> Mapping[str, tuple[int, ...]]:
        linears = _linears(module)
        down = linears[next(_layouts(linears))[-1]]
        return {"hidden": (down.out_features,), "intermediate": (down.in_features,)}

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """The linears stay modules, and give plain tensors: the kernel sees a part of the intermediate width."""
        styles = layout.styles_at(site.path)
        *into, down = (styles.get(name, "") for name in site.detail["layout"])
        if set(into) <= _DIVIDING and down == "rowwise":
            (width,) = site.sizes["intermediate"]
            return replace(site, sizes={**site.sizes, "intermediate": parts(width, layout.tp)})
        if set(into) <= _GATHERING and down in ("", *_SPLITTING):
            return site
        return refused(site, styles, "the kernel needs matching parts of gate and up, and a down that takes them")

    def called(self, site: Site) -> tuple[str, ...]:
        return tuple(site.detail["layout"])

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module, layout = model.get_submodule(site.path), self.called(site)
        reading = self.readings.of(module)
        children = dict(bypassed(module, reading, layout))
        bound = with_children_as_proven(over_linears(kernel, layout), type(module).forward, children)
        forward = with_own_signature(module, bound)  # type: ignore[arg-type]
        yield ForwardChange(module, forward, guarded_names(module, reading, layout))
        for name, child in children.items():
            yield GuardChange(module, name, child, guarded_names(child, self.readings.of(child)))


def _linears(module: nn.Module) -> dict[str, Any]:
    """The linears of ``module``; of four the three of a gated MLP, where one alone can be left out (GLM's merger)."""
    found = {
        name: child
        for name, child in module._modules.items()
        if child is not None and hasattr(child, "in_features") and hasattr(child, "out_features")
    }
    if len(found) != 4:
        return found
    threes = [{name: found[name] for name in names} for names in itertools.combinations(found, 3)]
    gated = [three for three in threes if any(True for _ in _layouts(three))]
    return gated[0] if len(gated) == 1 else found


def _mixed_dtypes(linears: dict[str, Any]) -> str:
    """Why linears of several floating-point dtypes can't be bound; empty if they all have the same dtype.

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


def _layouts(linears: dict[str, Any]) -> Iterator[Layout]:
    """Every way to assign the linears to ``(gate, up, down)`` or ``(packed, down)`` that their shapes allow."""
    shape = {name: (child.in_features, child.out_features) for name, child in linears.items()}
    if len(linears) == 3:
        for gate, up, down in itertools.permutations(linears):
            # A projector gives another width; keys, values and square queries of cross-attention are no gated MLP.
            projects = shape[gate][1] == shape[down][0] != shape[down][1]
            if shape[gate] == shape[up] and (projects or shape[gate] == shape[down][::-1]):
                yield gate, up, down
    if len(linears) == 2:
        for both, down in itertools.permutations(linears):
            if shape[both] == (shape[down][1], 2 * shape[down][0]):
                yield both, down


def _takes_one_tensor(module: nn.Module) -> bool:
    """Whether the forward requires exactly one argument, as an MLP's does and an attention's doesn't."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) == 1
