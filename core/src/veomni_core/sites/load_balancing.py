"""load_balancing_loss sites: models whose forward calls a load-balancing function of their module's globals."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.spec import KernelSpec
from veomni_core.ops.contract import Contract
from veomni_core.ops.load_balancing_loss import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.branches import Branches
from veomni_core.sites.code_reading import read_function, set_on_instance, why_not_clonable
from veomni_core.sites.functions import current_forward, global_functions, with_globals
from veomni_core.sites.site import Kernel, Site

_NAME = "load_balancing_loss_func"
_EXPERTS, _TOP_K, _BATCH = 9, 2, 2
_KEYS = 3  # product keys, whose 3 x 3 pairs are the experts


class LoadBalancingFunctions:
    """Finds the function by name, proves it by its values, and replaces it for one model."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        for path, module in model.named_modules():
            own = set_on_instance(module)
            forward = type(module).forward if own else current_forward(module)
            function = dict(global_functions(forward)).get(_NAME)
            if function is not None:
                why_not = own or why_not_clonable(forward, [_NAME])
                variant, evidence = (None, why_not) if why_not else _prove(function)
                yield Site("load_balancing_loss", path, rule, variant, evidence)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None, spec: KernelSpec | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        forward = with_globals(current_forward(module), {_NAME: kernel})
        yield ForwardChange(module, forward)


def _prove(function: Callable[..., Any]) -> tuple[str | None, str]:
    reading = read_function(function)
    if reading.doubts:
        return None, reading.doubts[0]
    with probe.seeded():
        misses = []
        for variant, contract in CONTRACTS.items():
            branches = Branches(reading.codes, frozenset(), inspect.unwrap(function), is_helper=True)  # type: ignore[arg-type]
            calls = _calls(variant)
            miss = max(_miss(branches, function, contract, arguments) for arguments in calls)
            if miss == 0.0:
                if open_choice := branches.never_run():
                    return None, f"{_NAME} is {variant} wherever it was run, but {open_choice}"
                return variant, f"{_NAME} gave the reference's values and gradients in each of its calls"
            misses.append((miss, variant))
    by_how_much, nearest = min(misses)
    return None, f"no variant fits; the nearest, {nearest}, misses by {by_how_much:.1%}"


def _calls(variant: str) -> list[tuple[Any, ...]]:
    """The arguments of each call for a variant: with and without a mask, few and many tokens, and in bfloat16."""
    calls: list[tuple[Any, ...]] = []
    for length, scale, dtype in ((5, 1.0, torch.float32), (70, 5.0, torch.float32), (9, 1.0, torch.bfloat16)):
        tokens = _BATCH * length
        if variant == "product_keys" and dtype is torch.bfloat16:
            continue  # sums of keys tie in bfloat16, and which of equal scores are the top k is not defined
        mask = torch.ones(_BATCH, length, dtype=torch.long)
        mask[1, length // 2 :] = 0

        def draw(*shape: int, scale: float = scale, dtype: torch.dtype = dtype) -> Tensor:
            return probe.random(*shape, scale=scale, dtype=dtype)

        if variant == "given_routes":
            probabilities = draw(_BATCH, length, _EXPERTS).softmax(dim=-1).requires_grad_()
            chosen = torch.randint(0, _EXPERTS, (_BATCH, length, _TOP_K), generator=probe.generator())
            calls += [(probabilities, chosen), (probabilities, chosen[..., 0]), (probabilities, chosen.int())]
        elif variant == "product_keys":
            keys = tuple(draw(2, tokens, _KEYS).requires_grad_() for _ in range(3))
            calls += [(keys, _EXPERTS, _KEYS, _TOP_K, padding) for padding in (None, mask)]
        else:
            logits = tuple(draw(tokens, _EXPERTS).requires_grad_() for _ in range(3))
            calls += [(logits, _EXPERTS, _TOP_K, padding) for padding in (None, mask)]
            calls += [(logits[:1], _EXPERTS, 1, mask)]
    return calls


def _miss(branches: Branches, function: Callable[..., Any], contract: Contract, arguments: tuple[Any, ...]) -> float:
    found, error = probe.attempt(partial(branches.run, partial(function, *arguments)))
    if error or not isinstance(found, Tensor):
        return float("inf")
    wanted, error = probe.attempt(partial(contract.reference, *arguments))
    if error:
        return float("inf")
    logits = arguments[0] if isinstance(arguments[0], tuple) else arguments[:1]
    if logits[0].dtype is torch.float32:
        return probe.miss(found, wanted, logits)
    share = probe.largest_miss(found, wanted)
    return 0.0 if share <= contract.values["bfloat16"].norm else share
