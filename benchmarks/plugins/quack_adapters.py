"""veomni-quack's kernels on one GPU against QuACK's own functions: what binding them costs.

    python benchmarks/plugins/quack_adapters.py [--only "adapter, cast_after" …] [--name quack_adapters_h200]

bf16, forward and backward. The adapters' results and gradients are compared with the contracts in float64 first.
`standard` has no function of QuACK's beside it: the library rounds elsewhere. Experts are measured by
``benchmarks/moe_experts/moe.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import hold
from veomni_ops import cross_entropy_loss, rms_norm, rotary_pos_emb
from veomni_ops.contract import Contract

EPS = 1e-6
TITLE = "veomni-quack beside QuACK's own functions, bf16"


@dataclass(frozen=True)
class Case:
    """One adapter, QuACK's own function where there is one, and what both are called with."""

    name: str
    shape: str
    contract: Contract
    arguments: tuple[Tensor, ...]
    extra: tuple[Any, ...]
    calls: dict[str, Callable[..., Any]]
    traffic: int

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors whose gradients are taken."""
        return [tensor for tensor in self.arguments if tensor.requires_grad]

    def check(self, upstream: Sequence[Tensor]) -> None:
        """Hold the adapter's result and gradients against float64."""
        exact = [tensor.detach() for tensor in self.arguments]
        exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in exact]
        for mine, theirs in zip(exact, self.arguments, strict=True):
            mine.requires_grad_(theirs.requires_grad)
        adapter = self.calls["adapter"]
        found, wanted = (
            as_tuple(call(*given, *self.extra))
            for call, given in ((adapter, self.arguments), (self.contract.reference, exact))
        )
        gradients = torch.autograd.grad(found, self.leaves, list(upstream))
        leaves = [tensor for tensor in exact if tensor.requires_grad]
        exact_gradients = torch.autograd.grad(wanted, leaves, [tensor.double() for tensor in upstream])
        for mine, theirs in zip(found, wanted, strict=True):
            hold(f"{self.name}: result", mine, theirs, self.contract.values["bfloat16"].norm)
        for mine, theirs in zip(gradients, exact_gradients, strict=True):
            hold(f"{self.name}: gradient", mine, theirs, self.contract.gradients["bfloat16"].norm)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device="cuda")).bfloat16().requires_grad_()


def norms(rows: int, width: int) -> list[Case]:
    adapters = import_module("veomni_quack.rms_norm")
    quack = import_module("quack.rmsnorm").rmsnorm
    own: dict[str, Callable[..., Tensor]] = {
        "standard": None,  # type: ignore[dict-item]
        "cast_after": lambda x, weight, eps: quack(x, weight, eps=eps),
        "offset": lambda x, weight, eps: quack(x, 1.0 + weight.float(), eps=eps),
        "unweighted": lambda x, eps: quack(x, eps=eps),
    }
    cases = []
    for variant, library in own.items():
        x, weight = leaf(rows, width), leaf(width)
        adapter = getattr(adapters, variant)
        contract = rms_norm.CONTRACTS[variant]
        arguments: tuple[Tensor, ...] = (x, weight)
        if variant == "unweighted":
            arguments, plain = (x,), adapter
            adapter = lambda x, eps, plain=plain: plain(x, None, eps)  # noqa: E731
            reference = contract.reference
            contract = Contract(
                contract.op_name,
                variant,
                lambda x, eps, reference=reference: reference(x, None, eps),
                contract.samples,
                contract.values,
                contract.gradients,
            )
        calls = {"adapter": adapter} | ({"QuACK": library} if library else {})
        cases.append(Case(variant, f"{rows} x {width}", contract, arguments, (EPS,), calls, 5 * x.nbytes))
    return cases


def rotation(batch: int = 4, positions: int = 4096, width: int = 128) -> Case:
    adapter = import_module("veomni_quack.rotary_pos_emb").full
    quack = import_module("quack.rotary").apply_rotary_emb
    q, k = (leaf(batch, positions, heads, width) for heads in (32, 8))
    angles = torch.randn(1, positions, width // 2, device="cuda").repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def library(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: int) -> tuple[Tensor, Tensor]:
        halves = (cos[0, :, : width // 2], sin[0, :, : width // 2])
        return quack(q, *halves), quack(k, *halves)

    shape = f"B={batch} S={positions} heads 32/8 D={width}"
    calls = {"adapter": adapter, "QuACK": library}
    contract = rotary_pos_emb.CONTRACTS["full"]
    return Case("full", shape, contract, (q, k, cos, sin), (2,), calls, 4 * (q.nbytes + k.nbytes))


def head(tokens: int = 8192, width: int = 2048, vocabulary: int = 151936) -> Case:
    adapter = import_module("veomni_quack.cross_entropy_loss.kernel").causal
    quack = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    arguments = (leaf(tokens, width), leaf(vocabulary, width, scale=width**-0.5), labels)
    calls = {"adapter": adapter, "QuACK": lambda *given: quack(*given, tuned=False)}
    contract = cross_entropy_loss.CONTRACTS["causal"]
    traffic = 3 * sum(tensor.nbytes for tensor in arguments[:2])
    return Case("causal", f"T={tokens} H={width} V={vocabulary}", contract, arguments, (), calls, traffic)


def main() -> None:
    options = memory_bound.options(__doc__)
    torch.manual_seed(0)
    figures = []
    for make in (lambda: norms(16384, 4096), lambda: norms(8192, 8192), lambda: [rotation()], lambda: [head()]):
        for case in make():
            with torch.no_grad():
                shapes = as_tuple(case.calls["adapter"](*case.arguments, *case.extra))
            upstream = [torch.randn_like(result) for result in shapes]
            case.check(upstream)
            torch.cuda.empty_cache()
            named = {f"{who}, {case.name}": call for who, call in case.calls.items()}
            for name, call in memory_bound.selected(named, options.only).items():
                figures.append(
                    memory_bound.measure(
                        name,
                        case.shape,
                        lambda call=call, case=case: call(*case.arguments, *case.extra),
                        lambda results, upstream=upstream: torch.autograd.backward(as_tuple(results), upstream),
                        case.leaves,
                        case.traffic,
                    )
                )
    memory_bound.write(options.name, TITLE, figures, __file__)


if __name__ == "__main__":
    main()
