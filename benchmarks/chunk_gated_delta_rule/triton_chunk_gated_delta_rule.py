"""The gated delta rule's Triton kernels on a GPU against fla, FlashQLA and others, in bf16, in one process.

    python benchmarks/chunk_gated_delta_rule/triton_chunk_gated_delta_rule.py --name triton_chunk_gated_delta_rule_h200

A time is the median of ``triton.testing.do_bench``, beside its 20th and 80th percentile. First the results and all
gradients of every contender are compared with the recurrence in float64, on fewer tokens; a contender that is wrong
there is not timed, and the note says how far off it is. ``--tune`` times our kernels alone over a grid of launches
instead, and prints the fastest, for the table in ``veomni_triton/chunk_gated_delta_rule/launch.py``; ``--only`` then
names kernels.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import relative_error
from benchmarks.shared.gpu_kernels import kernel_times
from benchmarks.shared.measuring import captured, timing, training_step
from benchmarks.shared.memory import peak_mib_of_step, saved_mib
from benchmarks.shared.results import machine, write_results
from veomni_fla import chunk_gated_delta_rule as adapters
from veomni_ops.chunk_gated_delta_rule import standard as recurrence
from veomni_torch import chunk_gated_delta_rule as plain
from veomni_triton import chunk_gated_delta_rule as ours
from veomni_triton.chunk_gated_delta_rule import launch as table
from veomni_triton.chunk_gated_delta_rule.launch import Launch, Launches

Rule = Callable[..., tuple[Tensor, Tensor | None]]
NAMES = ("output", "dq", "dk", "dv", "dg", "dbeta")
ALLOWED = 2e-2  # share of the norm, as the contract allows for bfloat16's gradients


@dataclass(frozen=True)
class Shape:
    """A batch, and the heads of one layer."""

    name: str
    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    width: int = 128
    sequences: int = 1  # packed into each row

    def __str__(self) -> str:
        packed = f" of {self.sequences} packed" if self.sequences > 1 else ""
        return f"{self.name}, {self.batch} x {self.tokens}{packed}"


SHAPES = (
    Shape("Qwen3-Next", 2, 4096, 16, 32),
    Shape("Qwen3-Next", 1, 16384, 16, 32),
    Shape("Qwen3-Next", 1, 16384, 16, 32, sequences=24),
)
SMALL = Shape("Qwen3-Next", 1, 515, 2, 4)


def drawn(shape: Shape) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """Query, key, value, g and beta, the options of a call, and the gradient of its output."""
    torch.manual_seed(0)
    tokens = (shape.batch, shape.tokens)

    def normal(*size: int) -> Tensor:
        return torch.randn(*tokens, *size, device="cuda").bfloat16()

    query, key = (normal(shape.key_heads, shape.width) for _ in range(2))
    value, dout = (normal(shape.value_heads, shape.width) for _ in range(2))
    g = -torch.rand(*tokens, shape.value_heads, device="cuda") * 0.2
    inputs = [query, key, value, g, torch.rand(*tokens, shape.value_heads, device="cuda").bfloat16()]
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    if shape.sequences > 1:
        ends = torch.linspace(0, shape.tokens, shape.sequences + 1).round().int()
        options["cu_seqlens"] = ends.cuda()
    return [x.requires_grad_() for x in inputs], options, dout


def contenders() -> dict[str, Rule]:
    found: dict[str, Rule] = {"ours": ours.standard, "chunked_delta": plain.standard}
    for name in ("fla", "fla_tilelang", "flash_qla"):
        try:
            # As a model binds them. fla's own call would run FlashQLA's kernels where both are installed.
            found[name] = getattr(adapters, name)()
        except ImportError as error:
            print(f"{name} is left out: {error}")
    modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    own = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)

    def in_transformers(query: Tensor, key: Tensor, value: Tensor, *gates: Tensor, **options: Any) -> Any:
        """As its layers call it: each value head has a copy of its query and key."""
        repeats = value.shape[2] // query.shape[2]
        return own(*(x.repeat_interleave(repeats, dim=2) for x in (query, key)), value, *gates, **options)

    found["transformers"] = in_transformers
    return found


def with_gradients(rule: Rule, inputs: list[Tensor], options: dict[str, Any], dout: Tensor) -> list[Tensor]:
    output = rule(*inputs, **options)[0]
    return [output.detach(), *torch.autograd.grad(output, inputs, dout.to(output.dtype))]


def errors(rules: dict[str, Rule], refused: dict[str, str]) -> dict[str, dict[str, float]]:
    """How far each contender's results and gradients are from the recurrence in float64; ``refused`` gets reasons."""
    inputs, options, dout = drawn(SMALL)
    exact = with_gradients(recurrence, [x.detach().double().requires_grad_() for x in inputs], options, dout)
    found = {}
    for name, rule in rules.items():
        try:
            results = with_gradients(rule, inputs, options, dout)
        except RuntimeError as error:  # fla refuses combinations of GPU and Triton that it knows to be wrong
            print(f"{name} is left out: {error}", flush=True)
            refused[name] = str(error).splitlines()[0]
            continue
        found[name] = {what: relative_error(mine, true) for what, mine, true in zip(NAMES, results, exact, strict=True)}
        print(f"{name}: off by " + ", ".join(f"{what} {error:.1e}" for what, error in found[name].items()), flush=True)
    return found


def measure(name: str, rule: Rule, shape: Shape) -> dict[str, Any]:
    inputs, options, dout = drawn(shape)
    forward = partial(rule, *inputs, **options)

    def backward(result: tuple[Tensor, Tensor | None]) -> None:
        result[0].backward(dout.to(result[0].dtype))

    both = training_step(forward, backward, inputs)
    found: dict[str, Any] = {"name": name, "shape": str(shape), "peak MiB": peak_mib_of_step(both, inputs)}
    found["saved MiB"] = saved_mib(forward)
    found["forward"], found["both"] = asdict(timing(forward, rep=100)), asdict(timing(both, rep=200))
    if shape.sequences == 1 and (replay := captured(both)):  # a packed call reads the boundaries
        found["graph"] = asdict(timing(replay))
    found["kernels ms"] = kernel_times(both)
    print({key: value for key, value in found.items() if key != "kernels ms"}, flush=True)
    for kernel, milliseconds in list(found["kernels ms"].items())[:10]:
        print(f"    {milliseconds:.3f} ms {kernel[:90]}", flush=True)
    return found


def row(found: dict[str, Any]) -> tuple[str, ...]:
    both = found["both"]
    return (
        found["shape"],
        found["name"],
        f"{found['forward']['median']:.2f}",
        f"{both['median']:.2f} ({both['low']:.2f} to {both['high']:.2f})",
        f"{found['graph']['median']:.2f}" if "graph" in found else "",
        f"{found['saved MiB']:.0f}",
        f"{found['peak MiB']:.0f}",
    )


def compare(name: str | None, only: list[str] | None) -> None:
    rules = memory_bound.selected(contenders(), only)
    refused: dict[str, str] = {}
    off = errors(rules, refused)
    right = {each: rules[each] for each, found in off.items() if all(error <= ALLOWED for error in found.values())}
    if "ours" not in right and not only:
        raise SystemExit("ours: wrong")
    figures = []
    for shape in SHAPES:
        for each, rule in right.items():
            if each == "transformers" and shape.sequences > 1:
                continue  # it mixes packed sequences
            print(f"{shape} {each}", flush=True)
            figures.append(measure(each, rule, shape))
            torch.cuda.empty_cache()
    if name:
        write(name, {"machine": machine(), "errors": off, "refused": refused, "figures": figures})


def write(name: str, data: dict[str, Any]) -> None:
    """The result file of what was measured."""
    worst = {each: max(found.values()) for each, found in data["errors"].items()}
    wrong = [each for each, error in worst.items() if error > ALLOWED]
    notes = [
        "Heads of 128; memory is beyond the inputs. Off by most, of outputs and gradients, against float64: "
        f"{', '.join(f'{each} {error:.1e}' for each, error in worst.items())}.",
        *(f"{each} raises here, and is not timed: {reason}." for each, reason in data["refused"].items()),
        *([f"More than {ALLOWED} is wrong, and was not timed: {', '.join(wrong)}."] if wrong else []),
    ]
    columns = ("shape", "kernel", "forward ms", "forward+backward ms (20 to 80 %)", "as a CUDA graph, ms")
    write_results(
        name,
        f"The gated delta rule, bf16, {data['machine']['gpu'].split()[1]}",
        data,
        (*columns, "saved MiB", "peak MiB"),
        [row(found) for found in data["figures"]],
        "\n\n".join(notes),
        script=__file__,
    )


def compare_at(shape: Shape, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """The contenders that are asked for at one shape; one that is wrong stops it."""
    rules = memory_bound.selected(contenders(), only)
    for name, found in errors(rules, {}).items():
        if (worst := max(found.values())) > ALLOWED:
            raise SystemExit(f"{name}: wrong, off by {worst:.1e}")
        yield measure(name, rules[name], shape)


BENCHMARK = memory_bound.benchmark({str(shape): shape for shape in SHAPES}, compare_at, ours=("ours",))


def candidates() -> Iterator[tuple[str, Launches]]:
    """The table's launches with one kernel's changed, by the kernel's name."""
    columns = {
        "corrections": (table.WHOLE,),
        "states": (16, 32, 64),
        "outputs": (64, 128),
        "correction_gradients": (table.WHOLE,),
        "state_gradients": (32, 64),
        "product_gradients": (32, 64, 128),
        "query_gradients": (32, 64, 128),
        "key_gradients": (16, 32, 64, 128),
    }
    for field in fields(Launches):
        warps_and_registers = ((4, None), (4, 168), (8, None), (8, 128))
        for width, stages, (warps, registers) in itertools.product(columns[field.name], (1, 2, 3), warps_and_registers):
            if width == table.WHOLE and stages > 1:
                continue  # nothing is in a loop
            launch = Launch(width, warps, stages, registers)
            yield field.name, replace(table.SIXTEEN_BITS, **{field.name: launch})


def kernel_milliseconds(what: str, launches: Launches, shape: Shape, repeats: int = 5) -> float:
    """The time of one kernel in forward and backward."""
    table.SIXTEEN_BITS = launches
    inputs, options, dout = drawn(shape)
    times = []
    for _ in range(repeats):
        found = kernel_times(partial(with_gradients, ours.standard, inputs, options, dout))
        times.append(sum(milliseconds for kernel, milliseconds in found.items() if kernel == f"{what}_kernel"))
    return sorted(times)[repeats // 2]


def compiled(candidate: tuple[str, Launches]) -> str:
    """Compile a candidate's kernels into Triton's cache on disk; the reason if they can't be."""
    table.SIXTEEN_BITS = candidate[1]
    try:
        inputs, options, dout = drawn(replace(SHAPES[0], tokens=128))
        with_gradients(ours.standard, inputs, options, dout)
        torch.cuda.synchronize()
    except Exception as error:  # whatever keeps it from running keeps it out of the table
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def tune(only: list[str] | None) -> None:
    every = [each for each in candidates() if not only or each[0] in only]
    # Compiling is what takes time, and each process can do it.
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        reasons = list(pool.map(compiled, every))
    print("compiled", flush=True)
    for what in dict.fromkeys(name for name, _ in every):
        times = []
        for (name, launches), reason in zip(every, reasons, strict=True):
            if name == what and not reason:
                times.append((kernel_milliseconds(what, launches, SHAPES[0], 3), getattr(launches, what)))
        for milliseconds, launch in sorted(times, key=lambda pair: pair[0])[:6]:
            print(f"{what} {milliseconds:.3f} ms {launch}", flush=True)
        slowest = max(times, key=lambda pair: pair[0])
        print(f"{what} slowest {slowest[0]:.3f} ms {slowest[1]}", flush=True)
    for (name, launches), reason in zip(every, reasons, strict=True):
        if reason:
            print(f"{name} {getattr(launches, name)}: {reason}")


def main() -> None:
    options = memory_bound.options(__doc__)
    if options.tune:
        tune(options.only)
    else:
        compare(options.name, options.only)


if __name__ == "__main__":
    main()
