"""What a model's attention functions compute: their values and gradients, compared with the contract's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from veomni_ops.attention import CONTRACTS, AttentionModule, standard
from veomni_transformers.attention.trace import AttentionCall
from veomni_transformers.proving import probe
from veomni_transformers.proving.proof import ProvenOnce

# Options that are not passed to the contract's reference: eager attention has them in its mask or does not use them,
# and the contract does not use them where there is a mask.
_NOT_GIVEN = frozenset({"indices", "block_indices", "is_causal", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k"})
_LONG = 72  # longer sequences, such as an image's positions, are shortened to this


class EagerProofs:
    """Compares eager attention functions with the contract, each kind of call once. To be used within ``seeded``."""

    def __init__(self) -> None:
        self._differences: ProvenOnce[str] = ProvenOnce()

    def mismatch(self, call: AttentionCall) -> str:
        """What the eager function of ``call`` computes differently from the contract; empty if nothing."""
        return self._differences.of(_form(call), lambda: _difference(call))

    def mismatch_of(self, function: Callable[..., Any], mask_builder: Any, call: AttentionCall) -> str:
        """As :meth:`mismatch`, of a ``function`` that other code has put into transformers' table of attention.

        ``mask_builder`` is the function of transformers that builds its masks.
        """
        as_registered = replace(call, eager=function)
        key = (_form(as_registered), mask_builder)
        return self._differences.of(key, lambda: _difference_of_registered(as_registered, mask_builder))


def _difference_of_registered(call: AttentionCall, mask_builder: Any) -> str:
    from transformers.masking_utils import eager_mask, sdpa_mask

    if mask_builder not in (eager_mask, sdpa_mask):
        return "is given masks that are neither eager attention's nor sdpa's, so it was not compared"
    boolean = mask_builder is sdpa_mask
    for dtype in (torch.float32, torch.bfloat16):
        for masked in (True, False) if boolean else (True,):
            if why := _mismatch(call, dtype, masked, registered=True, boolean=boolean):
                return f"is not standard: {why}{'' if dtype is torch.float32 else ' in bfloat16'}"
    return ""


def _difference(call: AttentionCall) -> str:
    if call.eager is None:
        return "its eager attention is not a function that it passes to transformers' interface"
    name = getattr(call.eager, "__name__", "its eager function")
    for dtype in (torch.float32, torch.bfloat16):
        for masked in (True, False) if call.mask is None else (True,):
            if why := _mismatch(call, dtype, masked):
                return f"{name} is not standard: {why}{'' if dtype is torch.float32 else ' in bfloat16'}"
    return ""


def _mismatch(
    call: AttentionCall, dtype: torch.dtype, masked: bool, registered: bool = False, boolean: bool = False
) -> str:
    """``registered`` functions are given no mask where transformers means causal, and ``boolean`` ones see True."""
    scales = (_scale_of_queries(call), 1.0, 1.0)
    drawn = (probe.random(*shape, dtype=dtype, scale=s) for s, shape in zip(scales, _shapes(call), strict=True))
    query, key, value = (each.requires_grad_() for each in drawn)
    mask = _mask(query, key) if masked else None
    holder, options, leaves = _random_options(call, dtype)
    given_mask = mask == 0 if boolean and mask is not None else mask
    with probe.own_numbers():
        found, error = probe.attempt(lambda: call.eager(holder, query, key, value, given_mask, **options)[0])  # type: ignore[misc]
    if registered and not masked and _is_causal(call):
        mask = torch.zeros(query.shape[2], key.shape[2], dtype=dtype)
        mask = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), torch.finfo(dtype).min)[None, None]
    if error:
        return error
    groups = getattr(call.module, "num_key_value_groups", query.shape[1] // max(key.shape[1], 1))
    given = {name: option for name, option in options.items() if name not in _NOT_GIVEN}
    reference = _reference(AttentionModule(groups, is_causal=False), given)
    inputs = (query, key, value, *leaves)
    if dtype is torch.float32:
        wanted, error = probe.attempt(lambda: reference(query, key, value, mask))
        if error:
            return "the contract does not take heads of these shapes"
        if not probe.close(found, wanted):
            return f"its values miss by {probe.largest_miss(found, wanted):.1%}"
        return "" if probe.gradients_close(found, wanted, inputs) else "its gradients differ"
    # bf16 values round in the function's own order, so they are compared in norm, with the reference in float64.
    exact, error = probe.attempt(lambda: _in_float64(call, reference, options, query, key, value, mask))
    if error:
        return error
    if found.dtype != dtype:
        return f"it gives {found.dtype}"
    miss = float((found.double() - exact).norm() / exact.norm())
    return "" if miss <= CONTRACTS["standard"].values["bfloat16"].norm else f"its values miss by {miss:.1%}"


def _scale_of_queries(call: AttentionCall) -> float:
    """What makes scores of the usual size: some modules scale queries themselves, before a call with ``scaling`` 1."""
    scaling = call.options.get("scaling")
    usual = call.heads[0].shape[-1] ** -0.5
    return usual / scaling if isinstance(scaling, float) and scaling > usual else 1.0


def _is_causal(call: AttentionCall) -> bool:
    given = call.options.get("is_causal")
    return bool(getattr(call.module, "is_causal", True) if given is None else given)


def _shapes(call: AttentionCall) -> list[torch.Size]:
    """The shapes ``[B, heads, length, width]`` of query, key and value, with lengths over 72 (images) shortened to 72.

    If two different lengths are over 72, the shorter one becomes 64. If an option has such a length too, as a position
    bias does, the lengths stay as they are.
    """
    shapes = [heads.shape for heads in call.heads]
    lengths = {shape[2] for shape in shapes if shape[2] > _LONG}
    given = {size for option in call.options.values() if isinstance(option, Tensor) for size in option.shape}
    if not lengths or lengths & given:
        return shapes
    shorter = {length: _LONG - 8 * place for place, length in enumerate(sorted(lengths, reverse=True))}
    return [torch.Size((*shape[:2], shorter.get(shape[2], shape[2]), shape[3])) for shape in shapes]


def _reference(module: AttentionModule, options: Mapping[str, Any]) -> Callable[..., Tensor]:
    return lambda query, key, value, mask, **wide: standard(module, query, key, value, mask, **{**options, **wide})[0]


def _in_float64(
    call: AttentionCall, reference: Callable[..., Tensor], options: Mapping[str, Any], *heads_and_mask: Any
) -> Tensor:
    wide = {n: o.double() for n, o in options.items() if isinstance(o, Tensor) and o.is_floating_point()}
    return reference(*(each if each is None else each.double() for each in heads_and_mask), **wide)


def _mask(query: Tensor, key: Tensor) -> Tensor:
    """A random additive mask ``[B, 1, S, L]`` that hides about 40% of the keys, but never the first one."""
    hidden = torch.rand(query.shape[0], 1, query.shape[2], key.shape[2], generator=probe.generator()) < 0.4
    hidden[..., 0] = False
    return torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min)


def _random_options(call: AttentionCall, dtype: torch.dtype) -> tuple[Any, dict[str, Any], list[Tensor]]:
    """Copies of the module and the options of ``call``, and the random tensors that were put into both.

    Random are the parameters that the eager function names, and the options that are floating-point tensors.
    """
    holder: Any = probe.bare_copy(call.module)
    drawn: dict[int, Tensor] = {}

    def draw(tensor: Tensor) -> Tensor:
        if id(tensor) not in drawn:
            drawn[id(tensor)] = probe.random(*tensor.shape, dtype=dtype).requires_grad_()
        return drawn[id(tensor)]

    read = set(_named_in(call.eager))
    for name, parameter in call.module._parameters.items():
        if parameter is not None and name in read:
            holder._parameters[name] = draw(parameter)
    for name, child in call.module._modules.items():  # in transformers 5.2, GPT-2's function calls its dropout module
        if child is not None and name in read:
            holder._modules[name] = probe.full_copy(child)
    options = {}
    for name, option in call.options.items():
        floating = isinstance(option, Tensor) and option.is_floating_point()
        options[name] = draw(option) if floating else option
    return holder, options, list(drawn.values())


def _named_in(function: Any) -> Iterator[str]:
    yield from getattr(getattr(function, "__code__", None), "co_names", ())


def _form(call: AttentionCall) -> Hashable:
    """A key that is equal for calls that one proof covers."""
    options = tuple((name, _plain(option)) for name, option in sorted(call.options.items()))
    read = tuple((name, repr(vars(call.module).get(name))) for name in _named_in(call.eager))
    groups = getattr(call.module, "num_key_value_groups", None)
    shapes = tuple(tuple(heads.shape) for heads in call.heads)
    return call.eager, shapes, call.mask is None, options, read, groups, call.module.training


def _plain(option: Any) -> Hashable:
    return (tuple(option.shape), option.dtype) if isinstance(option, Tensor) else repr(option)
