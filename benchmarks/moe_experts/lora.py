"""Fused experts under PEFT's adapters, forward and backward: adapters beside the weights, and added to a copy of them.

Writes ``docs/benchmarks/lora_on_experts.json`` and ``.md``. The module is Qwen3-MoE's, wrapped by PEFT and bound to
``grouped_mm``; "added" is the same kernel without the feature ``lora``, and transformers' own code. Contenders take
turns in each process. A ratio is that of the medians of one process, as the median and the range over processes.
Memory is the peak of what PyTorch's allocator holds above weights, adapters and inputs.

Where there is a GPU, the shape is that of Qwen3-30B in bf16, and the files are ``lora_on_experts_gpu``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.accuracy import hold
from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.in_processes import Calls, figures, leaf, measured_in_processes
from benchmarks.shared.results import machine, write_results
from veomni_core import KernelSpec, bind
from veomni_core.discovery.conflicts import CORE
from veomni_core.discovery.registry import PluginRecord, Registry, build_registry
from veomni_core.ops.moe_experts import standard as reference
from veomni_torch import moe_experts
from veomni_torch.plugin import veomni_kernels


@dataclass(frozen=True)
class Case:
    """What is measured: the numbers of tokens and choices, the rank, and the experts' shape."""

    tokens: int
    rank: int = 16
    hidden: int = 512
    intermediate: int = 192
    experts: int = 32
    k: int = 4
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        shape = f"H={self.hidden} I={self.intermediate} E={self.experts} K={self.k}"
        return f"T={self.tokens} r={self.rank} {shape}"


QWEN = {"hidden": 2048, "intermediate": 768, "experts": 128, "k": 8, "dtype": torch.bfloat16}
ON_CPU = {"many": Case(2048), "few": Case(256), "rank 64": Case(2048, rank=64)}
ON_GPU = {"qwen3-30b": Case(8192, **QWEN), "qwen3-30b, few": Case(2048, **QWEN)}
CASES = {"cpu": ON_CPU, "cuda": ON_GPU}
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # the errors of results, as norms
FULL, OWN, ADDED, BESIDE = "weights trained", "transformers, added", "grouped_mm, added", "grouped_mm, beside"


def adapted_experts(case: Case, device: str) -> nn.Module:
    """Qwen3-MoE's experts under a random adapter of both parameters, the same each time."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=case.hidden,
        moe_intermediate_size=case.intermediate,
        num_experts=case.experts,
        num_experts_per_tok=case.k,
    )
    config._experts_implementation = "eager"
    layer = nn.Module()
    with torch.device(device):  # 128 experts take seconds to draw on a CPU
        layer.experts = Qwen3MoeExperts(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=case.hidden**-0.5)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    lora = LoraConfig(r=case.rank, target_modules=[], target_parameters=targets, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's that there are no target modules
        return inject_adapter_in_model(lora, layer).to(device, case.dtype)


def registry(features: tuple[str, ...]) -> Registry:
    specs: list[KernelSpec] = [spec for spec in veomni_kernels() if spec.op_name == "moe_experts"]
    kernels = tuple(replace(spec, features=features) for spec in specs)
    return build_registry([CORE, PluginRecord("measured", "veomni-torch", "0", __name__, kernels=kernels)], {})


def contenders(case: Case, device: str) -> tuple[Calls, list[Tensor]]:
    """The calls, and every tensor that one of them gives a gradient to."""
    layers = {name: adapted_experts(case, device) for name in (OWN, ADDED, BESIDE)}
    for name, features in ((ADDED, ()), (BESIDE, ("lora",))):
        bind(layers[name], {"moe_implementation": "grouped_mm"}, registry=registry(features), device=device)
    options = {"device": device, "dtype": case.dtype}
    weights, index = torch.randn(case.tokens, case.experts, **options).softmax(-1).topk(case.k)
    hidden, weights = leaf(case.tokens, case.hidden, **options), weights.detach().requires_grad_()
    calls: Calls = {name: lambda layer=layer: layer.experts(hidden, index, weights) for name, layer in layers.items()}
    experts = layers[OWN].experts.get_base_layer()
    whole = [experts.gate_up_proj.detach().clone(), experts.down_proj.detach().clone()]
    for weight in whole:
        weight.requires_grad_()
    calls = {FULL: lambda: moe_experts.standard(hidden, index, weights, *whole), **calls}
    _check(calls, layers, (hidden, index, weights), ALLOWED[case.dtype])
    return calls, [hidden, weights, *whole, *(each for layer in layers.values() for each in layer.parameters())]


def _check(calls: Calls, layers: dict[str, nn.Module], inputs: tuple[Tensor, Tensor, Tensor], allowed: float) -> None:
    hidden, index, weights = inputs
    outer = layers[OWN].experts
    merged = {
        each.parameter_name: (each.get_param() + each.get_delta_weight("default")).detach().double()
        for each in (outer, outer.base_layer)
    }
    exact = reference(hidden.double(), index, weights.double(), merged["gate_up_proj"], merged["down_proj"])
    for name in layers:
        hold(name, calls[name](), exact, allowed)


def measure(case: Case, device: str, repeats: int, only: Collection[str] | None = None) -> dict[str, Any]:
    return {"case": str(case), **figures(*contenders(case, device), repeats, only)}


BENCHMARK = Benchmark(CASES, measure, ours=(BESIDE,), repeats=9)


def ratios(measured: dict[str, Any], than: str) -> list[float]:
    """How long adapters beside the weights take, as a share of ``than``, in each process."""
    times = measured["seconds in each process"]
    return [mine / theirs for mine, theirs in zip(times[BESIDE], times[than], strict=True)]


def row(measured: dict[str, Any]) -> tuple[str, ...]:
    def share(than: str) -> str:
        values = ratios(measured, than)
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    order = (FULL, OWN, ADDED, BESIDE)
    return (
        measured["case"],
        *(f"{1e3 * measured['seconds'][name]:.1f} ms" for name in order),
        *(share(than) for than in (FULL, ADDED)),
        " / ".join(f"{measured['peak bytes'][name]['both'] / 2**20:.0f}" for name in order) + " MiB",
    )


COLUMNS = (
    *("case", FULL, OWN, ADDED, BESIDE),
    *("beside, as a share of weights trained", "as a share of grouped_mm, added", "peak memory, in this order"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=BENCHMARK.repeats)
    parser.add_argument("--processes", type=int, default=5)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    cases = [
        measured_in_processes(__file__, device, case, options.repeats, options.processes) for case in CASES[device]
    ]
    write_results(
        "lora_on_experts_gpu" if gpu else "lora_on_experts",
        f"Adapters of fused experts, forward and backward, on {'a GPU in bfloat16' if gpu else 'the CPU in float32'}",
        {"cases": cases, "machine": machine()},
        COLUMNS,
        map(row, cases),
        "*Weights trained* has no adapter, and gradients of all weights. *Added* multiplies by a copy of the weights "
        "with the adapters added; PEFT's own code makes it.",
        script=__file__,
    )


if __name__ == "__main__":
    main()
