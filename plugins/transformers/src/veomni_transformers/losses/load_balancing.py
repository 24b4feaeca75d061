"""load_balancing_loss sites: models whose forward calls a load-balancing function of their module's globals."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.errors import ConfigError
from veomni_core.sites.site import Kernel, Site
from veomni_ops.contract import Contract
from veomni_ops.load_balancing_loss import CONTRACTS
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.called_functions import Function, callers, replaced
from veomni_transformers.proving.code_read import ReadsForward
from veomni_transformers.proving.code_reading import Reading, read_function
from veomni_transformers.proving.matching import Candidate, first_fit
from veomni_transformers.proving.proof import Proof

_NAME = "load_balancing_loss_func"
_EXPERTS, _TOP_K, _BATCH = 9, 2, 2
_STATED_AS = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "top_k"),
}
_KEYS = 3  # product keys, whose 3 x 3 pairs are the experts


class LoadBalancingFunctions(ReadsForward):
    """Finds the function by name, proves it by its values, and replaces it for one model."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        for caller in callers(model, lambda name: name == _NAME):
            proof = Proof(None, caller.why_not) if caller.why_not else _prove(caller.functions[_NAME])
            dtype = probe.parameter_dtype(caller.module)
            yield proof.site("load_balancing_loss", caller.path, rule, dtype=dtype, sizes=_sizes(caller.module))

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """Every rank has the router's logits of all experts, for the tokens of its batch."""
        return site

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        return replaced(model.get_submodule(site.path), _NAME, _of_some_router(kernel))


def _of_some_router(kernel: Kernel) -> Kernel:
    """``kernel``, which says so if the model has no router: transformers then fails with `tuple index out of range`."""

    @wraps(kernel)
    def load_balancing_loss(*arguments: Any, **named: Any) -> Any:
        if arguments and isinstance(arguments[0], tuple) and not arguments[0]:
            raise ConfigError(
                "output_router_logits asks for the loss of the routers, and no layer of this model has one: set it to "
                "False, or give the model layers with experts"
            )
        return kernel(*arguments, **named)

    return load_balancing_loss


def _sizes(module: Any) -> dict[str, tuple[int, ...]]:
    """The number of experts and how many a token chooses, by the attributes of the module or of its config."""
    config = getattr(module, "config", None)
    holders = (module, config.get_text_config()) if config is not None else (module,)
    sizes = {}
    for size, names in _STATED_AS.items():
        stated = (getattr(holder, name, None) for holder in holders for name in names)
        sizes[size] = tuple([value for value in stated if type(value) is int][:1])
    return sizes


def _prove(function: Function) -> Proof:
    reading = read_function(function)
    if reading.doubts:
        return Proof(None, reading.doubts[0])
    with probe.seeded():
        return first_fit(_candidates(function, reading), "its calls fit no variant")


def _candidates(function: Function, reading: Reading) -> Iterator[Candidate]:
    evidence = f"{_NAME} gave the reference's values and gradients in each of its calls"
    for variant, contract in CONTRACTS.items():
        # Of this variant's calls alone: what only another variant's calls reach was not compared with this one.
        branches = Branches(reading.codes, frozenset(), inspect.unwrap(function), is_helper=True)  # type: ignore[arg-type]
        miss = max(_miss(branches, function, contract, arguments) for arguments in _calls(variant))
        yield Candidate(f"{_NAME} is {variant}", miss, Proof(variant, evidence), branches)


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


def _miss(branches: Branches, function: Function, contract: Contract, arguments: tuple[Any, ...]) -> float:
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
