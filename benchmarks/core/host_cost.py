"""What a call of our Triton kernels costs on the host, without a GPU, and where it goes.

Writes ``benchmarks/results/host_cost.json``. Each kernel is compiled for sm90, and called on the CPU's tensors
with a driver whose launch does nothing: what is timed is Python and PyTorch's dispatcher, up to Triton's launcher in C.
Nothing is computed, so shapes are small: a launch costs the host the same for any, and large tensors cost the CPU's
allocator what they don't cost CUDA's. No GPU's time is in the figures, nor what a driver or CUDA's allocator takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, library
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.core.kernel_calls import CASES, Case
from benchmarks.shared.measuring import seconds_in_turns
from benchmarks.shared.results import machine, write_results
from benchmarks.shared.stand_in_gpu import stand_in_gpu

Call = Callable[[], Any]
Traced = tuple[Any, tuple[Any, ...], dict[str, Any]]  # what is called, and its arguments
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}  # by operator, the Python function behind it
CALLS = 20  # in a row, of which each repeat gives the mean: a few milliseconds, in which others may stay away


class Operators(TorchDispatchMode):
    """Lists what reaches the dispatcher beneath autograd: the operators, and the arguments of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Traced] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _detached(values: Any) -> Any:
    """Without autograd's notes, as an operator's function gets its arguments."""
    if isinstance(values, list | tuple):
        return [_detached(each) for each in values] if isinstance(values, list) else tuple(map(_detached, values))
    return values.detach() if isinstance(values, Tensor) else values


@contextmanager
def no_launches() -> Iterator[list[Any]]:
    """Leave out all that is done for a launch; what would have been launched is listed."""
    from triton.runtime.jit import JITFunction

    from veomni_ops import triton_launches

    left_out: list[Any] = []

    def nothing(function: Any, *_: Any, **__: Any) -> None:
        left_out.append(function)

    with patch.object(JITFunction, "run", nothing), patch.object(triton_launches._Launcher, "launch", nothing):
        yield left_out


def often(call: Call, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Call:
    def calls() -> None:
        with context():
            for _ in range(CALLS):
                call()

    return calls


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Microseconds of both passes, and what they are made of.

    What is left out, or called by itself, takes less; the difference is its share.
    """

    def forward() -> tuple[Tensor, ...]:
        result = case.call()
        return tuple(each for each in (result if isinstance(result, tuple) else (result,)) if each.requires_grad)

    upstream = [torch.ones_like(each) for each in forward()]

    def both() -> None:
        torch.autograd.grad(forward(), case.inputs, upstream)

    both()  # compiles
    with no_launches() as launches, Operators() as seen:
        both()
    count = len(launches)
    functions = [
        (IMPLEMENTATIONS[function.name()], _detached(args), kwargs)
        for function, args, kwargs in seen.found
        if _is_ours(function)
    ]

    def all_of(calls: Sequence[Traced]) -> None:
        for function, args, kwargs in calls:
            function(*args, **kwargs)

    with no_launches(), torch.no_grad(), Operators() as within:
        all_of(functions)
    turns = {
        "forward": often(case.call),
        "both": often(both),
        "without launches": often(both, no_launches),
        "functions": often(partial(all_of, functions), no_launches_or_autograd),
    }
    # The least: others' use of the machine only ever adds.
    least = {name: 1e6 * min(times) / CALLS for name, times in seconds_in_turns(turns, repeats).items()}
    return {
        "forward": least["forward"],
        "backward": least["both"] - least["forward"],
        "autograd and checks": least["without launches"] - least["functions"],
        "within operators": least["functions"],
        "tensors": len(within.found),
        "Triton": least["both"] - least["without launches"],
        "launches": count,
    }


@contextmanager
def no_launches_or_autograd() -> Iterator[None]:
    with no_launches(), torch.no_grad():
        yield


def _is_ours(operator: Any) -> bool:
    return str(operator.namespace) in ("veomni_triton", "veomni_triton_moe")


COUNTED = {"within operators": "tensors", "Triton": "launches"}
COLUMNS = (
    "kernel",
    "forward",
    "backward",
    "of both: autograd and checks",
    "within operators (tensors made or viewed)",
    "Triton (launches)",
)


def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        *(f"{found[key]:.0f}" for key in ("forward", "backward", "autograd and checks")),
        *(f"{found[key]:.0f} ({found[count]})" for key, count in COUNTED.items()),
    )


@contextmanager
def functions_noted() -> Iterator[None]:
    """Note the Python function of each operator that is defined."""
    impl = library.Library.impl
    custom_op = library.custom_op

    def noted_impl(self: Any, name: Any, function: Callable[..., Any], *rest: Any, **options: Any) -> Any:
        if isinstance(name, str):
            IMPLEMENTATIONS[f"{self.ns}::{name}"] = function
        return impl(self, name, function, *rest, **options)

    def noted_custom_op(name: str, **options: Any) -> Any:
        def noted(function: Callable[..., Any]) -> Any:
            IMPLEMENTATIONS[name] = function
            return custom_op(name, **options)(function)

        return noted

    with patch.object(library.Library, "impl", noted_impl), patch.object(library, "custom_op", noted_custom_op):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=150)
    parser.add_argument("--only", nargs="+", choices=CASES, help="print these, and write no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, dict[str, Any]] = {}
    with stand_in_gpu(), functions_noted():
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
            script=__file__,
        )


if __name__ == "__main__":
    main()
