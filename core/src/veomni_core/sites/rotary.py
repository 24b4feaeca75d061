"""rotary_pos_emb sites: attention modules that rotate queries and keys by a function of their module's globals."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from veomni_core.ops.rotary_pos_emb import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.functions import current_forward, global_functions, with_globals
from veomni_core.sites.site import AttributeChange, Change, Kernel, Site

_ROTARY_NAME = re.compile(r"apply_.*(rotary|rope)")
_HEAD = 16
# The variants that rotate all of a head, or a part of it, and how wide their cos is for a head of _HEAD.
_WHOLE = {
    "full": _HEAD,
    "interleaved": _HEAD,
    "pairwise": _HEAD,
    "deinterleaved": _HEAD,
    "half_width": _HEAD // 2,
}
_PART = {"partial": _HEAD // 2, "interleaved_partial": _HEAD // 2}


class RotaryFunctions:
    """Finds which rotary function an attention calls, with what widths, and what that function computes."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        widths = sorted({2 * b.shape[-1] for name, b in model.named_buffers() if name.endswith("inv_freq")})
        proofs: dict[Any, tuple[str | None, str, dict[str, Any]] | None] = {}
        for path, module in model.named_modules():
            functions = {n: f for n, f in global_functions(current_forward(module)) if _ROTARY_NAME.search(n)}
            if not functions:
                continue
            key = (probe.behaviour(module), tuple(functions.values()))
            if key not in proofs:
                proofs[key] = _prove(module, functions, widths)
            proof = proofs[key]
            if proof is None:
                continue
            variant, evidence, detail = proof
            yield Site("rotary_pos_emb", path, rule, variant, evidence, probe.parameter_dtype(module), detail)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        forward = with_globals(current_forward(module), {site.detail["function"]: kernel})
        yield AttributeChange(module, "forward", MethodType(forward, module))


def _prove(
    module: nn.Module, functions: dict[str, Callable[..., Any]], widths: list[int]
) -> tuple[str | None, str, dict[str, Any]] | None:
    """Variant, evidence and detail; ``None`` for a layer whose forward ends without a rotation."""
    if len(widths) != 1:
        return None, f"the model's rotary widths are {widths or 'unknown'}, expected one", {}
    if "config" not in vars(module):
        return None, "it keeps no config that says how wide its input is", {}
    call, why_not = _traced_call(module, functions, widths[0])
    if call is None:
        return (None, why_not, {}) if why_not else None
    name, head_width = call
    tried = []
    with probe.seeded():
        for variant, cos_width in _WHOLE.items() if head_width == widths[0] else _PART.items():
            why_not = _mismatch(functions[name], CONTRACTS[variant].reference, cos_width)
            if not why_not:
                evidence = (
                    f"{name}, on {widths[0]} of {head_width} dimensions, gave the reference's values and gradients"
                )
                return variant, evidence, {"function": name}
            tried.append(f"not {variant}: {why_not}")
    return None, f"{name} is {'; '.join(tried)}", {"function": name}


class _Reached(Exception):
    """Ends a trace at the first rotary call: ``(name, width of a head)``."""


def _traced_call(
    module: nn.Module, functions: dict[str, Callable[..., Any]], width: int
) -> tuple[tuple[str, int] | None, str]:
    """Run the attention on meta tensors up to its first rotary call, and see which function that is."""

    def recorder(name: str) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 4 or kwargs:
                raise TypeError(
                    f"{name} is called with {len(args)} arguments and {sorted(kwargs)}, expected q, k, cos, sin"
                )
            raise _Reached(name, args[0].shape[-1])

        return record

    twin = probe.meta_copy(module)
    forward = with_globals(type(module).forward, {name: recorder(name) for name in functions})
    hidden = torch.empty(1, 3, _hidden_size(module), device="meta", dtype=next(twin.parameters()).dtype)
    rotary = torch.empty(1, 3, width, device="meta", dtype=hidden.dtype)
    given = {"hidden_states": hidden, "position_embeddings": (rotary, rotary)}
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    arguments = {
        p.name: given.get(p.name)
        for p in parameters
        if p.name in given or (p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
    }
    try:
        forward(twin, **arguments)
    except _Reached as reached:
        return reached.args, ""  # type: ignore[return-value]
    except Exception as error:  # any model's code may run here, on inputs that it may not expect
        return None, f"its forward could not be traced: {type(error).__name__}: {error}"
    return None, ""


def _hidden_size(module: nn.Module) -> int:
    return module.config.hidden_size  # type: ignore[union-attr,return-value]


def _mismatch(function: Callable[..., Any], reference: Kernel, width: int) -> str:
    q, k = probe.random(2, 4, 5, _HEAD).requires_grad_(), probe.random(2, 2, 5, _HEAD).requires_grad_()
    # Not cosines and sines of anything: the two functions must agree whatever they are given.
    cos, sin = probe.random(2, 5, width), probe.random(2, 5, width)
    found, error = probe.attempt(lambda: function(q, k, cos, sin))
    if error:
        return error
    if not isinstance(found, tuple) or len(found) != 2:
        return "it does not give a pair"
    for side, got, want, source in zip("qk", found, reference(q, k, cos, sin), (q, k), strict=True):
        if not probe.close(got, want):
            return f"{side} misses by {probe.largest_miss(got, want):.1%}"
        if not probe.gradients_close(got, want, (source,)):
            return f"the gradient of {side} differs"
    return ""
