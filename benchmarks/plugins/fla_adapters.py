"""What veomni-fla's calls cost beside the libraries' own, in bf16 on one GPU: forward and backward, time and memory.

    python benchmarks/plugins/fla_adapters.py --name fla_adapters_h200

Each of our calls runs the kernels of the library's own call, so their results are compared first, and should have the
same bits. The library's own call gets what the adapter makes of the op's arguments: boundaries that it has not seen
before, since the adapter has new ones in every call too. Libraries that are not installed are left out. A call that
raises is a line of the table: on Hopper with Triton 3.4 to 3.7.0, fla's backward does, unless TileLang is installed.
fla's own call takes the backend that is installed. Where FlashQLA or TileLang is, run ``fla`` with
``FLA_FLASH_QLA=0 FLA_TILELANG=0`` in the environment to compare the same kernels, and ``fla_tilelang`` with the first.

With ``--device cpu`` it only checks itself: nothing is measured, and the shapes are small.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.measuring import timing, training_step
from benchmarks.shared.memory import peak_mib_of_step
from benchmarks.shared.results import machine, write_results
from veomni_fla import causal_conv1d, chunk_gated_delta_rule, kda, mamba2_scan, rms_norm_gated
from veomni_ops.causal_conv1d import numbered

Function = Callable[..., Any]
OWN = "the library's own"


@dataclass(frozen=True)
class Comparison:
    """Our kernel and the library's own call on the same inputs; those that require gradients get them."""

    op: str
    kernel: str
    package: str
    shape: str
    inputs: tuple[Tensor, ...]
    ours: Callable[[], Function]
    own: Callable[[], Function]


class Shapes:
    """Sizes of models, or small ones on a CPU."""

    def __init__(self, device: str) -> None:
        self.device, self.small = device, device == "cpu"
        self.tokens, self.key_heads, self.value_heads = (64, 1, 2) if self.small else (8192, 16, 32)
        self.channels = 64 if self.small else 8192

    def drawn(self, *shape: int, scale: float = 1.0) -> Tensor:
        # Triton's interpreter can't add numbers in bfloat16.
        dtype = torch.float16 if self.small else torch.bfloat16
        return (torch.randn(*shape, device=self.device) * scale).to(dtype).requires_grad_()

    def bounds(self) -> Tensor:
        """Four packed sequences of a row, of different lengths."""
        tokens = self.tokens
        return torch.tensor([0, tokens // 8, tokens // 2, tokens - 5, tokens], dtype=torch.int32, device=self.device)


def delta_rules(shapes: Shapes, name: str, packed: bool) -> Comparison:
    """As Qwen3-Next has them, queries and keys normalised by the kernel."""
    length, heads, values = shapes.tokens, shapes.key_heads, shapes.value_heads
    q, k = (shapes.drawn(1, length, heads, 128) for _ in range(2))
    v, beta = shapes.drawn(1, length, values, 128), torch.rand(1, length, values, device=shapes.device).bfloat16()
    g = (-torch.rand(1, length, values, device=shapes.device)).requires_grad_()
    inputs = (q, k, v, g, beta.requires_grad_())
    bounds = shapes.bounds() if packed else None

    def run(function: Function, fresh: bool, *inputs: Tensor) -> Tensor:
        given = bounds.clone() if fresh and bounds is not None else bounds
        options = {} if given is None else {"cu_seqlens": given}
        return function(*inputs, use_qk_l2norm_in_kernel=True, **options)[0]

    def own() -> Function:
        if name == "flash_qla":
            from flash_qla import chunk_gated_delta_rule as function
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
        return partial(run, function, True)

    package = {"fla": "fla", "fla_tilelang": "tilelang", "flash_qla": "flash_qla"}[name]
    shape = f"S={length} heads {heads}/{values} of 128{', packed' * packed}"
    ours = getattr(chunk_gated_delta_rule, name)
    return Comparison("chunk_gated_delta_rule", name, package, shape, inputs, lambda: partial(run, ours(), False), own)


def kimi_attention(shapes: Shapes) -> Comparison:
    """As Kimi Linear has it."""
    length, heads = shapes.tokens, shapes.value_heads
    q, k, v = (shapes.drawn(1, length, heads, 128) for _ in range(3))
    g = (-torch.rand(1, length, heads, 128, device=shapes.device)).requires_grad_()
    beta = torch.rand(1, length, heads, device=shapes.device).bfloat16().requires_grad_()

    def run(function: Function, *inputs: Tensor) -> Tensor:
        return function(*inputs, use_qk_l2norm_in_kernel=True)[0]

    def own() -> Function:
        from fla.ops.kda import chunk_kda

        return partial(run, chunk_kda)

    shape = f"S={length} heads {heads} of 128"
    return Comparison("kda", "fla", "fla", shape, (q, k, v, g, beta), lambda: partial(run, kda.fla()), own)


def convolutions(shapes: Shapes, package: bool, packed: bool) -> Comparison:
    """A mixer's, of width 4 with silu, on channels that are next to each other in memory."""
    length, channels = 2 * shapes.tokens, shapes.channels
    lengths = [length // 8, length // 2, length - length // 8 - length // 2]
    numbers = numbered(lengths, torch.device(shapes.device)) if packed else None
    ends = torch.tensor([0, *lengths], device=shapes.device).cumsum(0).int()

    def ours(function: Function, x: Tensor, weight: Tensor) -> Tensor:
        return function(x.transpose(1, 2), weight, None, "silu", numbers)

    def by_fla(function: Function, x: Tensor, weight: Tensor) -> Tensor:
        y, _ = function(x, weight, activation="silu", cu_seqlens=ends.clone() if packed else None)
        return y.transpose(1, 2)

    def by_package(function: Function, x: Tensor, weight: Tensor) -> Tensor:
        return function(x.transpose(1, 2), weight, activation="silu", seq_idx=numbers)

    def own() -> Function:
        if package:
            from causal_conv1d import causal_conv1d_fn

            return partial(by_package, causal_conv1d_fn)
        from fla.modules.causal_conv1d import causal_conv1d as function

        return partial(by_fla, function)

    kernel = "causal_conv1d" if package else "fla"
    make = causal_conv1d.causal_conv1d if package else causal_conv1d.fla
    inputs = shapes.drawn(1, length, channels), shapes.drawn(channels, 4, scale=0.5)
    shape = f"{length}x{channels}{', packed' * packed}"
    return Comparison("causal_conv1d", kernel, kernel, shape, inputs, lambda: partial(ours, make()), own)


def norms(shapes: Shapes) -> Comparison:
    """As Kimi Linear has them: a row per token and head."""
    rows = shapes.tokens * shapes.value_heads

    def run(function: Function, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return function(x, gate, weight, 1e-6)

    def own() -> Function:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated as function

        return lambda x, gate, weight: function(x, gate, weight, None, activation="sigmoid", eps=1e-6)

    inputs = shapes.drawn(rows, 128), shapes.drawn(rows, 128), shapes.drawn(128)
    ours = lambda: partial(run, rms_norm_gated.sigmoid())  # noqa: E731
    return Comparison("rms_norm_gated sigmoid", "fla", "fla", f"{rows}x128", inputs, ours, own)


def scans(shapes: Shapes) -> Comparison:
    """As Bamba has it."""
    length, heads, groups, width, state = shapes.tokens, 4 * shapes.value_heads, 1, 64, 128
    x, dt = shapes.drawn(1, length, heads, width), shapes.drawn(1, length, heads)
    A = (-torch.rand(heads, device=shapes.device)).requires_grad_()
    B, C = (shapes.drawn(1, length, groups, state, scale=state**-0.5) for _ in range(2))

    def run(function: Function, *inputs: Tensor) -> Tensor:
        return function(*inputs, dt_softplus=True)[0]

    def own() -> Function:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as function

        return lambda *inputs: function(*inputs, 256, dt_softplus=True).float()

    shape = f"S={length} heads {heads} of {width}, state {state}"
    ours = lambda: partial(run, mamba2_scan.mamba_ssm())  # noqa: E731
    return Comparison("mamba2_scan", "mamba_ssm", "mamba_ssm", shape, (x, dt, A, B, C), ours, own)


def comparisons(shapes: Shapes) -> Iterator[Comparison]:
    """All of them, one after the other: each holds its inputs."""
    for name in ("fla", "fla_tilelang", "flash_qla"):
        for packed in (False, True):
            yield delta_rules(shapes, name, packed)
    yield kimi_attention(shapes)
    for package in (False, True):
        for packed in (False, True):
            yield convolutions(shapes, package, packed)
    yield norms(shapes)
    yield scans(shapes)


def results(function: Function, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output and all gradients for one upstream gradient."""
    output = function(*inputs)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return output.detach(), *torch.autograd.grad(output, inputs, upstream)


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest norm of a difference, as a share of the norm."""
    shares = [
        (f.float() - w.float()).norm() / w.float().norm().clamp_min(1e-30) for f, w in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(shares).max())


def measure(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Forward and backward of our call and of the library's own."""
    wanted: tuple[Tensor, ...] | None = None
    for call, make in ((OWN, comparison.own), (f"veomni-fla's {comparison.kernel}", comparison.ours)):
        found: dict[str, Any] = {
            "op": comparison.op,
            "kernel": comparison.kernel,
            "shape": comparison.shape,
            "call": call,
        }
        inputs = comparison.inputs
        try:
            function = make()
            computed = results(function, inputs)
            found["difference"] = None if wanted is None else difference(computed, wanted)
            wanted = wanted or computed
            upstream = torch.randn_like(computed[0])

            def forward(function: Function = function, inputs: tuple[Tensor, ...] = inputs) -> tuple[Tensor, ...]:
                return (function(*inputs),)

            if inputs[0].is_cuda:
                step = training_step(forward, partial(torch.autograd.backward, grad_tensors=[upstream]), inputs)
                found["peak MiB"] = peak_mib_of_step(step, inputs)
                found["milliseconds"] = asdict(timing(step))
        except Exception as error:  # what a library raises here is a result
            found["raised"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        print(found, flush=True)
        yield found


def rows(figures: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    own = {(each["op"], each["kernel"], each["shape"]): each for each in figures if each["call"] == OWN}
    for each in figures:
        place = (each["op"], each["shape"], each["call"])
        if "milliseconds" not in each:
            yield (*place, each.get("raised", "not measured"), "", "", "")
            continue
        time, theirs = each["milliseconds"], own[each["op"], each["kernel"], each["shape"]].get("milliseconds")
        share = f"{time['median'] / theirs['median']:.3f}" if theirs else ""
        apart = each["difference"]
        yield (
            *place,
            f"{time['median']:.3f} ({time['low']:.3f} to {time['high']:.3f})",
            share,
            "" if apart is None else "same bits" if apart == 0 else f"{apart:.1e}",
            f"{each['peak MiB']:.0f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="*", metavar="OP", help="comparisons whose op starts so")
    parser.add_argument("--name", help="the result file to write; none without it")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = [
        found
        for comparison in comparisons(Shapes(options.device))
        if not options.only or comparison.op.startswith(tuple(options.only))
        if importlib.util.find_spec(comparison.package)
        for found in measure(comparison)
    ]
    columns = ("op", "shape", "call", "forward+backward ms (20 to 80 %)", "share of its own", "apart by", "peak MiB")
    if options.name:
        data = {"machine": machine(), "figures": figures}
        write_results(options.name, "veomni-fla beside its libraries", data, columns, rows(figures), script=__file__)
    else:
        for line in rows(figures):
            print(" | ".join(line))


if __name__ == "__main__":
    main()
