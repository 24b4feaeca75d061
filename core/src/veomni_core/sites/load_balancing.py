"""load_balancing_loss sites: models whose forward calls a load-balancing function of their module's globals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes import Change, ForwardChange, setter_of
from veomni_core.ops.load_balancing_loss import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.functions import current_forward, global_functions, with_globals
from veomni_core.sites.site import Kernel, Site

_NAME = "load_balancing_loss_func"
_EXPERTS, _TOP_K, _BATCH, _LENGTH = 9, 2, 2, 5
_KEYS = 3  # whose pairs are the experts


class LoadBalancingFunctions:
    """Finds the function by name, proves it by its values, and replaces it for one model."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        for path, module in model.named_modules():
            function = dict(global_functions(type(module).forward)).get(_NAME)
            if function is not None:
                variant, evidence = _prove(function)
                if setter := setter_of(module):
                    variant, evidence = None, f"its forward can't be replaced: it was {setter}"
                yield Site("load_balancing_loss", path, rule, variant, evidence)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        forward = with_globals(current_forward(module), {_NAME: kernel})
        yield ForwardChange(module, forward)


def _prove(function: Callable[..., Any]) -> tuple[str | None, str]:
    with probe.seeded():
        misses = []
        for variant, contract in CONTRACTS.items():
            miss = max(_miss(function, contract.reference, arguments) for arguments in _calls(variant))
            if miss == 0.0:
                return variant, f"{_NAME} gave the reference's values and gradients in each of its calls"
            misses.append((miss, variant))
    by_how_much, nearest = min(misses)
    return None, f"no variant fits; the nearest, {nearest}, misses by {by_how_much:.1%}"


def _calls(variant: str) -> list[tuple[Any, ...]]:
    """The arguments of a variant, with and without what is optional."""
    tokens = _BATCH * _LENGTH
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    if variant == "given_routes":
        probabilities = probe.random(_BATCH, _LENGTH, _EXPERTS).softmax(dim=-1).requires_grad_()
        chosen = torch.randint(0, _EXPERTS, (_BATCH, _LENGTH, _TOP_K))
        return [(probabilities, chosen), (probabilities, chosen[..., 0])]
    if variant == "product_keys":
        keys = tuple(probe.random(2, tokens, _KEYS).requires_grad_() for _ in range(3))
        return [(keys, _EXPERTS, _KEYS, _TOP_K, chosen) for chosen in (None, mask)]
    logits = tuple(probe.random(tokens, _EXPERTS).requires_grad_() for _ in range(3))
    return [(logits, _EXPERTS, _TOP_K, chosen) for chosen in (None, mask)]


def _miss(function: Callable[..., Any], reference: Kernel, arguments: tuple[Any, ...]) -> float:
    found, error = probe.attempt(lambda: function(*arguments))
    if error or not isinstance(found, Tensor):
        return float("inf")
    first = arguments[0]
    return probe.miss(found, reference(*arguments), first if isinstance(first, tuple) else (first,))
