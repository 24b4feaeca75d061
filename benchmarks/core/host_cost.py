"""What a call of veomni-triton's kernels costs on the host, without a GPU, and where it goes.

Writes ``docs/benchmarks/host_cost.json`` and ``.md``. Each kernel is compiled for sm90, and called on the CPU's tensors
with a driver whose launch does nothing: what is timed is Python and PyTorch's dispatcher, up to Triton's launcher in C.
Nothing is computed, so shapes are small: a launch costs the host the same for any, and large tensors cost the CPU's
allocator what they don't cost CUDA's. No GPU's time is in the figures, nor what a driver or CUDA's allocator takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, library, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.in_processes import leaf
from benchmarks.shared.measuring import seconds
from benchmarks.shared.results import machine, write_results
from benchmarks.shared.stand_in_gpu import stand_in_gpu

Call = Callable[[], Any]
IMPLEMENTATIONS: dict[str, Call] = {}  # by operator, the Python function behind it
CALLS = 100  # in a row, of which each repeat gives the mean


@dataclass(frozen=True)
class Case:
    """A call of a kernel.

    Attributes:
        name: of the row.
        call: forward.
        inputs: those that get gradients.
    """

    name: str
    call: Call
    inputs: Sequence[Tensor]


def bfloat16(*shape: int) -> Tensor:
    return leaf(*shape, dtype=torch.bfloat16)


def norm() -> Case:
    from veomni_triton import rms_norm

    x, weight = bfloat16(2, 16, 1024), bfloat16(1024)
    return Case("rms_norm", lambda: rms_norm.standard(x, weight, 1e-6), [x, weight])


class Norm(nn.Module):
    """A norm whose code is a call of the kernel."""

    def __init__(self, eps: float) -> None:
        from veomni_triton import rms_norm

        super().__init__()
        self.weight, self.eps, self._kernel = nn.Parameter(torch.ones(1024).bfloat16()), eps, rms_norm.standard

    def forward(self, x: Tensor) -> Tensor:
        return self._kernel(x, self.weight, self.eps)


def module_norm() -> Case:
    """What a bound module is compared with."""
    x, module = bfloat16(2, 16, 1024), Norm(1e-6)
    return Case("rms_norm in a module", lambda: module(x), [x, module.weight])


def bound_norm() -> Case:
    """The same in a module of a model that was bound, in which a norm's own code was."""
    from veomni_core.sites.norms.rms_norm import NormModules
    from veomni_core.sites.site import Site
    from veomni_triton import rms_norm

    model = nn.Sequential(nn.RMSNorm(1024, eps=1e-6, dtype=torch.bfloat16))
    site = Site("rms_norm", "0", "norm modules", "standard", "", detail={"eps": 1e-6})
    for change in NormModules().install(model, site, rms_norm.standard, None):
        change.apply()
    x, module = bfloat16(2, 16, 1024), model[0]
    return Case("rms_norm in a bound module", lambda: module(x), [x, module.weight])


def gated_norm() -> Case:
    from veomni_triton import rms_norm_gated

    x, gate, weight = bfloat16(256, 128), bfloat16(256, 128), bfloat16(128)
    return Case("rms_norm_gated", lambda: rms_norm_gated.standard(x, gate, weight, 1e-6), [x, gate, weight])


def rotary() -> Case:
    from veomni_triton import rotary_pos_emb

    # As models make them: [B, S, H, D], transposed.
    q, k = (bfloat16(2, 8, heads, 128) for heads in (16, 8))
    cos, sin = torch.randn(2, 1, 8, 128).bfloat16().unbind()
    return Case("rotary_pos_emb", lambda: rotary_pos_emb.full(q.transpose(1, 2), k.transpose(1, 2), cos, sin), [q, k])


def swiglu() -> Case:
    from veomni_triton import swiglu_mlp

    gate, up = bfloat16(2, 16, 1024), bfloat16(2, 16, 1024)
    return Case("swiglu_mlp", lambda: swiglu_mlp.standard(gate, up), [gate, up])


def load_balancing() -> Case:
    from veomni_triton import load_balancing_loss

    logits = tuple(bfloat16(8, 128) for _ in range(48))
    return Case("load_balancing_loss, 48 layers", lambda: load_balancing_loss.standard(logits, 128, 8), logits)


def experts(rank: int = 0) -> Case:
    from veomni_triton import moe_experts

    tokens, hidden, intermediate, count, k = 64, 128, 64, 16, 4
    states, weights = bfloat16(tokens, hidden), bfloat16(tokens, k)
    index = torch.randn(tokens, count).topk(k).indices
    gate_up, down = bfloat16(count, 2 * intermediate, hidden), bfloat16(count, hidden, intermediate)
    inputs, adapters = [states, weights, gate_up, down], []
    if rank:
        factors = [
            (bfloat16(count, rank, width), bfloat16(count, height, rank))
            for height, width in (gate_up.shape[1:], down.shape[1:])
        ]
        adapters = [(a, b, 2.0) for a, b in factors]
        for frozen in (gate_up, down):
            frozen.requires_grad_(False)
        inputs = [states, weights, *(factor for pair in factors for factor in pair)]
    name = f"moe_experts, frozen, adapters of rank {rank}" if rank else "moe_experts"
    return Case(name, lambda: moe_experts.standard(states, index, weights, gate_up, down, *adapters), inputs)


def convolution() -> Case:
    from veomni_triton import causal_conv1d

    # As models make them: [B, S, C], transposed.
    x, weight = bfloat16(1, 128, 256), bfloat16(256, 4)
    return Case(
        "causal_conv1d", lambda: causal_conv1d.standard(x.transpose(1, 2), weight, activation="silu"), [x, weight]
    )


def delta_rule() -> Case:
    from veomni_triton import chunk_gated_delta_rule

    query, key, value = bfloat16(1, 128, 2, 128), bfloat16(1, 128, 2, 128), bfloat16(1, 128, 4, 128)
    g, beta = leaf(1, 128, 4), bfloat16(1, 128, 4)
    inputs = [query, key, value, g, beta]
    return Case(
        "chunk_gated_delta_rule",
        lambda: chunk_gated_delta_rule.standard(*inputs, use_qk_l2norm_in_kernel=True)[0],
        inputs,
    )


def logprobs() -> Case:
    from veomni_triton import token_logprobs

    states, weight, labels = bfloat16(16, 16), bfloat16(512, 16), torch.arange(16)
    kernel = token_logprobs.causal(0)
    return Case("token_logprobs, one tile", lambda: kernel(states, weight, labels)[0], [states, weight])


CASES = {
    "rms_norm": norm,
    "module_rms_norm": module_norm,
    "bound_rms_norm": bound_norm,
    "rms_norm_gated": gated_norm,
    "rotary_pos_emb": rotary,
    "swiglu_mlp": swiglu,
    "load_balancing_loss": load_balancing,
    "moe_experts": experts,
    "moe_experts_adapters": partial(experts, 16),
    "causal_conv1d": convolution,
    "chunk_gated_delta_rule": delta_rule,
    "token_logprobs": logprobs,
}


class Operators(TorchDispatchMode):
    """Lists what reaches the dispatcher beneath autograd: the operators, and the arguments of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _detached(values: Any) -> Any:
    """Without autograd's notes, as an operator's function gets its arguments."""
    if isinstance(values, list | tuple):
        return [_detached(each) for each in values] if isinstance(values, list) else tuple(map(_detached, values))
    return values.detach() if isinstance(values, Tensor) else values


@dataclass
class Launches:
    """Stands before Triton: counts launches, and with ``skipped`` leaves out all that Triton does for one."""

    skipped: bool = False
    count: int = field(default=0, init=False)

    @contextmanager
    def watched(self) -> Iterator[Launches]:
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def watched(function: Any, *args: Any, **options: Any) -> Any:
            self.count += 1
            return None if self.skipped else run(function, *args, **options)

        with patch.object(JITFunction, "run", watched):
            yield self


def microseconds(calls: Iterable[tuple[Any, tuple[Any, ...], dict[str, Any]]], repeats: int) -> float:
    """The time of all ``calls`` together."""
    calls = [(function, _detached(args), kwargs) for function, args, kwargs in calls]

    def all_often() -> None:
        for _ in range(CALLS):
            for function, args, kwargs in calls:
                function(*args, **kwargs)

    with torch.no_grad():
        return least(all_often, repeats)


def least(often: Call, repeats: int) -> float:
    """Microseconds of one call: others' use of the machine only ever adds to it."""
    return 1e6 * min(seconds(often, repeats)) / CALLS


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Microseconds of both passes, and what they are made of.

    What is skipped or called by itself takes less; the difference is its share.
    """
    result = case.call()
    results = [each for each in (result if isinstance(result, tuple) else (result,)) if each.requires_grad]
    upstream = [torch.ones_like(each) for each in results]

    def backward(found: Any) -> None:
        found = [each for each in (found if isinstance(found, tuple) else (found,)) if each.requires_grad]
        torch.autograd.grad(found, case.inputs, upstream)

    def forward_often() -> None:
        for _ in range(CALLS):
            case.call()

    def both_often() -> None:
        for _ in range(CALLS):
            backward(case.call())

    forward, both = least(forward_often, repeats), least(both_often, repeats)
    with Launches().watched() as launches:
        backward(case.call())
    with Launches(skipped=True).watched():
        without_triton = least(both_often, repeats)
        with Operators() as operators:
            backward(case.call())
        ours = [call for call in operators.found if call[0].namespace == "veomni_triton"]
        as_operators = microseconds(ours, repeats)
        functions = [(IMPLEMENTATIONS[call[0].name()], *call[1:]) for call in ours]
        as_functions = microseconds(functions, repeats)
        with Operators() as within, torch.no_grad():
            for function, args, kwargs in functions:
                function(*_detached(args), **kwargs)
    return {
        "forward": forward,
        "backward": both - forward,
        "both": both,
        "autograd and checks": without_triton - as_operators,
        "dispatch": as_operators - as_functions,
        "operators": len(ours),
        "within operators": as_functions,
        "tensors": len(within.found),
        "Triton": both - without_triton,
        "launches": launches.count,
    }


COUNTED = {"dispatch": "operators", "within operators": "tensors", "Triton": "launches"}
COLUMNS = (
    "kernel",
    "forward",
    "backward",
    "of both: autograd and checks",
    "dispatch (operators)",
    "within them (tensors made or viewed)",
    "Triton (launches)",
)


def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        *(f"{found[key]:.0f}" for key in ("forward", "backward", "autograd and checks")),
        *(f"{found[key]:.0f} ({found[count]})" for key, count in COUNTED.items()),
    )


NOTE = (
    "Microseconds of host time, the least of several repeats, on a CPU with a stand-in for Triton's driver: kernels "
    "are compiled for sm90, and their launch does nothing. No GPU's time is in it, and neither are CUDA's driver and "
    "allocator, nor what Triton's launcher does in C. Tensors are bfloat16 and small."
)


@contextmanager
def functions_noted() -> Iterator[None]:
    """Note the Python function of each operator that is defined."""
    impl = library.Library.impl
    custom_op = library.custom_op

    def noted_impl(self: Any, name: Any, function: Call, *rest: Any, **options: Any) -> Any:
        if isinstance(name, str):
            IMPLEMENTATIONS[f"{self.ns}::{name}"] = function
        return impl(self, name, function, *rest, **options)

    def noted_custom_op(name: str, **options: Any) -> Any:
        def noted(function: Call) -> Any:
            IMPLEMENTATIONS[name] = function
            return custom_op(name, **options)(function)

        return noted

    with patch.object(library.Library, "impl", noted_impl), patch.object(library, "custom_op", noted_custom_op):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=CASES, help="print these, and write no page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, dict[str, Any]] = {}
    with stand_in_gpu(), functions_noted():
        from veomni_triton.moe_experts import tiles

        with patch.object(tiles, "_has_copy_engine", lambda device: True):  # as on sm90
            for name in options.only or CASES:
                case = CASES[name]()
                found[case.name] = measure(case, options.repeats)
                print(*row(case.name, found[case.name]), sep=" | ", flush=True)
    if not options.only:
        write_results(
            "host_cost",
            "What a call costs on the host",
            {"microseconds": found, "machine": machine()},
            COLUMNS,
            [row(name, each) for name, each in found.items()],
            NOTE,
            script=__file__,
        )


if __name__ == "__main__":
    main()
