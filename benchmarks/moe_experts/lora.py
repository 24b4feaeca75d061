"""Fused experts under PEFT's adapters, forward and backward: adapters beside the weights, and added to a copy of them.

Writes ``benchmarks/results/lora_on_experts.json``. The module is Qwen3-MoE's, wrapped by PEFT and bound to our
kernels; "added" is the same kernel without the feature ``lora``, and transformers' own code. Contenders take turns.
On a CPU, a ratio is that of the medians of one process, as the median and the range over processes.
Memory is the peak of what PyTorch's allocator holds above weights, adapters and inputs.

Where there is a GPU, the shape is that of Qwen3-30B in bf16, and the files are ``lora_on_experts_gpu``. One process
measures all cases there. A step is timed on the wall clock, where the GPU waits for Python; and by the sum of its
kernels' times, which is what a step takes where the CPU is ahead. A ratio of the first is that of two calls of a turn,
as the median and the middle 60 % of turns; a ratio of the second is that of medians.
``--kernels`` prints the GPU kernels that the time goes to, and writes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
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
from benchmarks.shared.gpu_kernels import launch_times
from benchmarks.shared.in_processes import Calls, figures, leaf, measured_in_processes
from benchmarks.shared.measuring import drop_gradients, seconds_in_turns
from benchmarks.shared.memory import peak_bytes
from benchmarks.shared.results import machine, write_results
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, bind
from veomni_core.discovery.registry import PluginRecord, Registry, build_registry
from veomni_ops.moe_experts import standard as reference
from veomni_torch import moe_experts
from veomni_torch.plugin import veomni_kernels as torch_kernels


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


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QWEN = {"hidden": 2048, "intermediate": 768, "experts": 128, "k": 8, "dtype": torch.bfloat16}
ON_CPU = {"many": Case(2048), "few": Case(256), "rank 64": Case(2048, rank=64)}
ON_GPU = {
    "qwen3-30b": Case(8192, **QWEN),
    "qwen3-30b, many": Case(16384, **QWEN),
    "qwen3-30b, few": Case(2048, **QWEN),
    "qwen3-30b, rank 64": Case(8192, rank=64, **QWEN),
}
CASES = {"cpu": ON_CPU, "cuda": ON_GPU}
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # the errors of results, as norms
FULL, OWN, ADDED, BESIDE = "grouped_mm, trained", "transformers, added", "grouped_mm, added", "grouped_mm, beside"
FUSED_FULL, FUSED_FROZEN, FUSED_BESIDE = "fused_triton, trained", "fused_triton, frozen", "fused_triton, beside"
ORDER = {
    "cpu": (FULL, OWN, ADDED, BESIDE),
    "cuda": (FULL, OWN, BESIDE, FUSED_FULL, FUSED_FROZEN, FUSED_BESIDE),
}
RATIOS = {
    "cpu": ((BESIDE, FULL), (BESIDE, ADDED)),
    "cuda": ((FUSED_BESIDE, FUSED_FULL), (FUSED_BESIDE, FULL), (FUSED_BESIDE, BESIDE)),
}


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


def bound_experts(case: Case, device: str, kernel: str, features: tuple[str, ...] = ("lora",)) -> nn.Module:
    """The same, bound to ``kernel`` with these features."""
    layer = adapted_experts(case, device)
    bind(layer, {"moe_implementation": kernel}, registry=_registry(kernel, features), device=device)
    return layer


def _registry(kernel: str, features: tuple[str, ...]) -> Registry:
    specs: list[KernelSpec] = list(_fused_kernels() if kernel == "fused_triton" else torch_kernels())
    kernels = tuple(replace(spec, features=features) for spec in specs if spec.op_name == "moe_experts")
    return build_registry([*definitions(), PluginRecord("measured", "veomni", "0", __name__, kernels=kernels)], {})


def _fused_kernels() -> list[KernelSpec]:
    from veomni_triton_moe.plugin import veomni_kernels  # here, since CPUs are measured without Triton

    return veomni_kernels()


def contenders(case: Case, device: str) -> tuple[Calls, list[Tensor]]:
    """The calls, and every tensor that one of them gives a gradient to."""
    layers = {OWN: adapted_experts(case, device), BESIDE: bound_experts(case, device, "grouped_mm")}
    if device == "cuda":
        layers[FUSED_BESIDE] = bound_experts(case, device, "fused_triton")
    else:
        layers[ADDED] = bound_experts(case, device, "grouped_mm", features=())
    options = {"device": device, "dtype": case.dtype}
    weights, index = torch.randn(case.tokens, case.experts, **options).softmax(-1).topk(case.k)
    hidden, weights = leaf(case.tokens, case.hidden, **options), weights.detach().requires_grad_()
    calls: Calls = {name: lambda layer=layer: layer.experts(hidden, index, weights) for name, layer in layers.items()}
    experts = layers[OWN].experts.get_base_layer()
    frozen = [experts.gate_up_proj.detach(), experts.down_proj.detach()]
    whole = [weight.clone().requires_grad_() for weight in frozen]
    calls[FULL] = lambda: moe_experts.standard(hidden, index, weights, *whole)
    if device == "cuda":
        from veomni_triton_moe.moe_experts import standard

        calls[FUSED_FULL] = lambda: standard(hidden, index, weights, *whole)
        calls[FUSED_FROZEN] = lambda: standard(hidden, index, weights, *frozen)
    _check(calls, layers, (hidden, index, weights), ALLOWED[case.dtype])
    calls = {name: calls[name] for name in ORDER[device]}
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
    """The medians of one process."""
    return {"case": str(case), **figures(*contenders(case, device), repeats, only)}


BENCHMARK = Benchmark(CASES, measure, ours=(BESIDE, FUSED_BESIDE), repeats=9)


def measure_turns(case: str, repeats: int) -> dict[str, Any]:
    """Every turn of one process, on a GPU."""
    calls, inputs = contenders(ON_GPU[case], "cuda")
    steps = {name: partial(_step, call) for name, call in calls.items()}
    before = partial(drop_gradients, inputs)
    times = seconds_in_turns(steps, repeats, warm_ups=3, before=before, wait=torch.cuda.synchronize)
    return {
        "case": str(ON_GPU[case]),
        "seconds": {which: statistics.median(values) for which, values in times.items()},
        "seconds in each turn": times,
        "seconds of kernels": {which: _seconds_of_kernels(step, before) for which, step in steps.items()},
        "peak bytes": {which: peak_bytes(call, inputs) for which, call in calls.items()},
    }


def _seconds_of_kernels(step: Callable[[], None], before: Callable[[], None]) -> float:
    sums = []
    for _ in range(5):
        before()
        sums.append(sum(milliseconds for _, milliseconds in launch_times(step)) / 1e3)
    return statistics.median(sums)


def _step(call: Callable[[], Tensor]) -> None:
    result = call()
    result.backward(torch.ones_like(result))


def print_kernels(case: str) -> None:
    """The GPU kernels of our steps in order, and how long each takes."""
    calls, inputs = contenders(ON_GPU[case], "cuda")
    for name in (FUSED_FULL, FUSED_FROZEN, FUSED_BESIDE):
        _step(calls[name])
        drop_gradients(inputs)
        launches = launch_times(partial(_step, calls[name]))
        print(f"{ON_GPU[case]}: {name}: {sum(each for _, each in launches):.3f} ms of kernels")
        for kernel, milliseconds in launches:
            print(f"  {milliseconds:7.3f} ms  {kernel[:100]}")


def ratio(measured: dict[str, Any], mine: str, theirs: str) -> str:
    """How long ``mine`` takes as a share of ``theirs``: the median, and how far it spreads."""
    if "seconds in each turn" in measured:
        times = measured["seconds in each turn"]
        values = sorted(a / b for a, b in zip(times[mine], times[theirs], strict=True))
        low, *_, high = statistics.quantiles(values, n=5)
    else:
        times = measured["seconds in each process"]
        values = [a / b for a, b in zip(times[mine], times[theirs], strict=True)]
        low, high = min(values), max(values)
    found = f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"
    if of_kernels := measured.get("seconds of kernels"):
        found += f"; of kernels {of_kernels[mine] / of_kernels[theirs]:.2f}"
    return found


def step_time(measured: dict[str, Any], name: str) -> str:
    """On the wall clock, and on a GPU also that of the kernels."""
    of_kernels = measured.get("seconds of kernels")
    return f"{1e3 * measured['seconds'][name]:.1f} ms" + (f" / {1e3 * of_kernels[name]:.2f}" if of_kernels else "")


def row(measured: dict[str, Any]) -> tuple[str, ...]:
    return (
        measured["case"],
        *(step_time(measured, name) for name in ORDER[DEVICE]),
        *(ratio(measured, mine, theirs) for mine, theirs in RATIOS[DEVICE]),
        " / ".join(f"{measured['peak bytes'][name]['both'] / 2**20:.0f}" for name in ORDER[DEVICE]) + " MiB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = DEVICE == "cuda"
    parser.add_argument("--repeats", type=int, default=25 if gpu else BENCHMARK.repeats)
    parser.add_argument("--processes", type=int, default=5, help="on a CPU")
    parser.add_argument("--case", choices=ON_GPU, default=next(iter(ON_GPU)), help="that --kernels is about")
    parser.add_argument("--kernels", action="store_true", help="on a GPU, print each kernel of one case in order")
    options = parser.parse_args()
    if options.kernels:
        print_kernels(options.case)
        return
    cases = [
        measure_turns(case, options.repeats)
        if gpu
        else measured_in_processes(__file__, DEVICE, case, options.repeats, options.processes)
        for case in CASES[DEVICE]
    ]
    write_results(
        "lora_on_experts_gpu" if gpu else "lora_on_experts",
        f"Adapters of fused experts, forward and backward, on {'a GPU in bfloat16' if gpu else 'the CPU in float32'}",
        {"cases": cases, "machine": machine()},
        (
            *("case", *ORDER[DEVICE]),
            *(f"{mine}, as a share of {theirs}" for mine, theirs in RATIOS[DEVICE]),
            "peak memory, in this order",
        ),
        map(row, cases),
        script=__file__,
    )


if __name__ == "__main__":
    main()
