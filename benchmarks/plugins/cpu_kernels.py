"""veomni-torch's kernels on the CPU against transformers' own code, forward and backward.

Writes ``benchmarks/results/cpu_kernels.json``. Each row is measured in several processes, in each of which the
contenders take turns; a time is the median over processes of the median turn. Memory is the peak of what PyTorch's CPU
allocator holds above the inputs, summed over the allocator's own events of one run. Over forward and backward it
includes the gradients of the inputs, which every implementation must hold; over forward alone it is what the op keeps
for backward and its temporaries.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral_load_balancing
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, load_balancing_loss_func

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.in_processes import Calls, figures, leaf, measured_in_processes
from benchmarks.shared.results import machine, write_results
from veomni_torch import cross_entropy_loss, load_balancing_loss, moe_experts, rms_norm, swiglu_mlp


def chunk_loss() -> tuple[str, Calls, list[Tensor]]:
    tokens, hidden, vocabulary = 2048, 256, 32000
    states, weight = leaf(tokens, hidden), leaf(vocabulary, hidden, scale=hidden**-0.5)
    labels = torch.randint(vocabulary, (tokens,))

    def eager() -> Tensor:
        return ForCausalLMLoss(F.linear(states, weight), None, vocabulary, shift_labels=labels)

    calls = {"transformers": eager, "ours": lambda: cross_entropy_loss.causal(states, weight, labels)}
    return f"chunk_loss, T={tokens} H={hidden} V={vocabulary}", calls, [states, weight]


def experts() -> tuple[str, Calls, list[Tensor]]:
    tokens, hidden, intermediate, count, k = 2048, 256, 128, 32, 4
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=count, num_experts_per_tok=k
    )
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=hidden**-0.5)
    states, scores = leaf(tokens, hidden), torch.randn(tokens, count).softmax(-1)
    weights, index = scores.topk(k)
    weights = weights.detach().requires_grad_()
    calls = {
        "transformers": lambda: module(states, index, weights),
        "ours": lambda: moe_experts.standard(states, index, weights, module.gate_up_proj, module.down_proj),
    }
    return (
        f"grouped_mm, T={tokens} H={hidden} I={intermediate} E={count} K={k}",
        calls,
        [states, weights, *module.parameters()],
    )


def load_balancing(name: str, theirs: Callable[..., Any]) -> tuple[str, Calls, list[Tensor]]:
    layers, tokens, count, k = 8, 4096, 64, 8
    logits = tuple(leaf(tokens, count) for _ in range(layers))
    calls = {
        "transformers": lambda: theirs(logits, count, k),
        "ours": lambda: load_balancing_loss.standard(logits, count, k),
    }
    return f"load_balancing_loss ({name}'s), L={layers} T={tokens} E={count} K={k}", calls, list(logits)


def norm() -> tuple[str, Calls, list[Tensor]]:
    module, x = LlamaRMSNorm(1024), leaf(4096, 1024)
    calls = {"transformers": lambda: module(x), "ours": lambda: rms_norm.standard(x, module.weight, 1e-6)}
    return "rms_norm, 4096x1024", calls, [x, module.weight]


def swiglu() -> tuple[str, Calls, list[Tensor]]:
    gate, up, act = leaf(4096, 1024), leaf(4096, 1024), ACT2FN[LlamaConfig().hidden_act]
    return (
        "swiglu_mlp, 4096x1024",
        {
            "transformers": lambda: act(gate) * up,
            "ours": lambda: swiglu_mlp.standard(gate, up),
        },
        [gate, up],
    )


Case = Callable[[], tuple[str, Calls, list[Tensor]]]
CASES: dict[str, Case] = {
    "chunk_loss": chunk_loss,
    "experts": experts,
    "load_balancing_qwen3_moe": lambda: load_balancing("Qwen3-MoE", load_balancing_loss_func),
    "load_balancing_mixtral": lambda: load_balancing("Mixtral", mixtral_load_balancing),
    "norm": norm,
    "swiglu": swiglu,
}


def measure(case: Case, device: str, repeats: int, only: Collection[str] | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    name, calls, inputs = case()
    return {
        "case": name,
        **figures(calls, inputs, repeats, only),
        "gradient bytes": sum(tensor.numel() * tensor.element_size() for tensor in inputs),
    }


BENCHMARK = Benchmark({"cpu": CASES}, measure, ours=("ours",), repeats=9)


def row(measured: dict[str, Any]) -> tuple[str, ...]:
    times, memory = measured["seconds"], measured["peak bytes"]
    theirs, ours = memory["transformers"], memory["ours"]
    return (
        measured["case"],
        *(f"{1e3 * value:.1f} ms" for value in times.values()),
        f"{times['transformers'] / times['ours']:.2f}x",
        *(f"{theirs[span] / 2**20:.1f} / {ours[span] / 2**20:.1f} MiB" for span in ("forward", "both")),
        *(f"{ours[span] / theirs[span]:.0%}" for span in ("forward", "both")),
        f"{measured['gradient bytes'] / 2**20:.1f} MiB",
    )


COLUMNS = (
    "case",
    "transformers",
    "ours",
    "speed",
    "peak in forward, theirs / ours",
    "peak over both passes",
    "share in forward",
    "share over both",
    "of which gradients",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=BENCHMARK.repeats)
    parser.add_argument("--processes", type=int, default=5)
    options = parser.parse_args()
    cases = [measured_in_processes(__file__, "cpu", case, options.repeats, options.processes) for case in CASES]
    write_results(
        "cpu_kernels",
        "veomni-torch on the CPU against transformers, forward and backward",
        {"cases": cases, "machine": machine()},
        COLUMNS,
        map(row, cases),
        script=__file__,
    )


if __name__ == "__main__":
    main()
