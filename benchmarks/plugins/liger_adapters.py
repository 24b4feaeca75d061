"""What veomni-liger's calls cost beside Liger's own, in bf16 on one GPU: forward and backward, time and peak memory.

    python benchmarks/plugins/liger_adapters.py --search --name liger_adapters_h200

With ``--search`` Liger's experts search for their configurations too, which takes minutes; what they find is printed as
``pinned_experts.py`` has it.

Our calls keep what Liger's own overwrite: gate and up, queries and keys, incoming gradients. A line of Liger's that
copies them too shows what is the copy and what is ours. Of Liger's own linear cross entropy there are several sizes of
chunks, 2048 tokens where none is named. What takes less than a millisecond is mostly Python's time; as a CUDA graph it
is the GPU's alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from liger_kernel.ops import fused_moe
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.measuring import captured, timing, training_step
from benchmarks.shared.memory import peak_mib_of_step
from benchmarks.shared.results import machine, write_results
from veomni_core.kernels import IGNORED
from veomni_liger import cross_entropy_loss, moe_experts, rms_norm, rotary_pos_emb, swiglu_mlp
from veomni_liger.pinned_experts import CONFIGURATIONS, pinned_experts

Function = Callable[..., Any]
Calls = dict[str, Function]
OURS, OWN = "veomni-liger", "Liger's own"


@dataclass(frozen=True)
class Comparison:
    """Calls of one op on the same inputs; those that require gradients get them."""

    op: str
    shape: str
    inputs: tuple[Tensor, ...]
    calls: Calls


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16().requires_grad_()


def norms() -> Comparison:
    rows, width = 16384, 4096

    def own(in_place: bool, x: Tensor, weight: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "gemma", in_place)

    calls = {
        OURS: lambda x, weight: rms_norm.cast_after(x, weight, 1e-6),
        OWN: partial(own, False),
        "Liger's own, in place": partial(own, True),
    }
    return Comparison("rms_norm cast_after", f"{rows}x{width}", (drawn(rows, width), drawn(width)), calls)


class _CopiedGradient(torch.autograd.Function):
    """The identity; what comes back is copied, so that whoever gets it may write into it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.clone()


def rotations() -> Comparison:
    batch, positions, q_heads, k_heads, width = 4, 4096, 32, 8, 128
    q, k = (drawn(batch, positions, heads, width) for heads in (q_heads, k_heads))
    angles = torch.randn(batch, positions, width // 2, device="cuda").repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def rotated(function: Function, q: Tensor, k: Tensor) -> Any:
        return function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    def copying(q: Tensor, k: Tensor, *angles: Tensor) -> Any:
        return tuple(map(_CopiedGradient.apply, LigerRopeFunction.apply(q.clone(), k.clone(), *angles)))

    calls = {
        OURS: partial(rotated, rotary_pos_emb.full),
        OWN + ", in place": partial(rotated, LigerRopeFunction.apply),
        OWN: partial(rotated, copying),
    }
    shape = f"B={batch} S={positions} heads {q_heads}/{k_heads} D={width}"
    return Comparison("rotary_pos_emb full", shape, (q, k), calls)


def activations() -> Comparison:
    rows, width = 16384, 6144
    calls = {
        OURS: swiglu_mlp.standard,
        OWN + ", in place": LigerSiLUMulFunction.apply,
        OWN: lambda gate, up: LigerSiLUMulFunction.apply(gate.clone(), up.clone()),
    }
    return Comparison("swiglu_mlp", f"{rows}x{width}", (drawn(rows, width), drawn(rows, width)), calls)


def linear_losses(width: int, vocabulary: int) -> Comparison:
    tokens = 8192
    labels = torch.randint(vocabulary, (tokens,), device="cuda")

    def own(multiple: int, hidden: Tensor, weight: Tensor) -> Tensor:
        options = (None, None, IGNORED, 0.0, 0.0, "mean", None, False, None, False, False, False, None, None)
        return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, *options, multiple)[0]

    calls: Calls = {OURS: lambda hidden, weight: cross_entropy_loss.causal(hidden, weight, labels)}
    for name, rows in ((OWN, 2048), (f"{OWN}, chunks of 1024", 1024), (f"{OWN}, all at once", tokens)):
        calls[name] = partial(own, max((vocabulary - 1) // (width * max(tokens // rows - 1, 1)), 1))
    calls[f"{OWN}, its default chunks"] = partial(own, 1)
    inputs = drawn(tokens, width, scale=0.5), drawn(vocabulary, width, scale=0.02)
    return Comparison("cross_entropy_loss causal", f"T={tokens} H={width} V={vocabulary}", inputs, calls)


def class_losses() -> Comparison:
    rows, classes = 8192, 32
    labels = torch.randint(classes, (rows,), device="cuda")
    calls = {
        OURS: lambda logits: cross_entropy_loss.seq_cls(logits, labels),
        OWN: lambda logits: LigerCrossEntropyFunction.apply(logits.float(), labels, None)[0],
    }
    return Comparison("cross_entropy_loss seq_cls", f"{rows}x{classes}", (drawn(rows, classes),), calls)


def experts(search: bool) -> Comparison:
    tokens, hidden, intermediate, count, k = 16384, 2048, 768, 128, 8
    index = torch.rand(tokens, count, device="cuda").topk(k).indices
    inputs = (
        drawn(tokens, hidden),
        torch.rand(tokens, k, device="cuda").bfloat16().requires_grad_(),
        drawn(count, 2 * intermediate, hidden, scale=hidden**-0.5),
        drawn(count, hidden, intermediate, scale=intermediate**-0.5),
    )
    short = index.int()

    def own(function: Function, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        return function(x, gate_up, down, short, weights)

    calls: Calls = {
        OURS: lambda x, *rest: moe_experts.standard(x, index, *rest),
        OWN: partial(own, pinned_experts().apply),
    }
    if search:
        calls[OWN + ", searched"] = partial(own, fused_moe.LigerFusedMoEFunction.apply)
    return Comparison("moe_experts", f"T={tokens} H={hidden} I={intermediate} E={count} K={k}", inputs, calls)


def measure(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Forward and backward of each call, with gradients dropped first."""
    inputs = comparison.inputs
    for name, call in comparison.calls.items():

        def forward(call: Function = call) -> tuple[Tensor, ...]:
            found = call(*inputs)
            return found if isinstance(found, tuple) else (found,)

        upstream = [torch.randn_like(x) if x.dim() else torch.ones_like(x) for x in forward()]
        step = training_step(forward, partial(torch.autograd.backward, grad_tensors=upstream), inputs)
        peak = peak_mib_of_step(step, inputs)
        found = {"op": comparison.op, "shape": comparison.shape, "call": name, "peak MiB": peak}
        found["milliseconds"] = asdict(timing(step))
        replay = captured(step)
        found["graph milliseconds"] = timing(replay).median if replay else None
        print(found, flush=True)
        yield found


def rows(figures: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    own = {(found["op"], found["shape"]): found for found in figures if found["call"] == OWN}
    for found in figures:
        time, graph = found["milliseconds"], found["graph milliseconds"]
        peer = own[found["op"], found["shape"]]
        own_time, own_graph = peer["milliseconds"], peer["graph milliseconds"]
        share = graph / own_graph if graph and own_graph else time["median"] / own_time["median"]
        yield (
            found["op"],
            found["shape"],
            found["call"],
            f"{time['median']:.3f} ({time['low']:.3f} to {time['high']:.3f})",
            f"{graph:.3f}" if graph else "",
            f"{share:.2f}",
            f"{found['peak MiB']:.0f}",
        )


def print_found_configurations() -> None:
    """What Liger's kernels found for each key that they search by."""
    for name in CONFIGURATIONS:
        for key, found in getattr(fused_moe, name).cache.items():
            print(f'    "{name}": {found.all_kwargs()},  # for {key}', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="measure Liger's experts after their own search as well")
    parser.add_argument("--only", nargs="*", metavar="OP", help="comparisons whose op starts so")
    parser.add_argument("--name", help="the result file to write; none without it")
    options = parser.parse_args()
    torch.manual_seed(0)
    makers = {
        "rms_norm": norms,
        "rotary_pos_emb": rotations,
        "swiglu_mlp": activations,
        "cross_entropy_loss": partial(linear_losses, 2048, 151936),
        "cross_entropy_loss of fewer words": partial(linear_losses, 4096, 131072),
        "cross_entropy_loss seq_cls": class_losses,
        "moe_experts": partial(experts, options.search),
    }
    chosen = [make for name, make in makers.items() if not options.only or name.startswith(tuple(options.only))]
    figures = [found for make in chosen for found in measure(make())]
    if options.search:
        print_found_configurations()
    times = ("forward+backward ms (20 to 80 %)", "as a CUDA graph, ms")
    columns = ("op", "shape", "call", *times, "share of Liger's own", "peak MiB")
    if options.name:
        data = {"machine": machine(), "figures": figures}
        write_results(options.name, "veomni-liger beside Liger", data, columns, rows(figures), script=__file__)
    else:
        for line in rows(figures):
            print(" | ".join(line))


if __name__ == "__main__":
    main()
