"""What the core costs: import, listing, discovery of many plugins, finding sites, and a bound site in forward.

Sites are found in one large model and in every causal model type of the installed transformers.

Writes ``benchmarks/results/core.json``. Run it on an otherwise idle machine:
``python benchmarks/core/core.py``. Times are medians; those of whole processes are of wall-clock time, and the bare
interpreter's is subtracted where the row says so.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.measuring import seconds, seconds_in_turns
from benchmarks.shared.results import machine, write_results

PLUGIN_SOURCE = """
from veomni_core import HardwareRequirement, KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1
VARIANTS = ("standard", "cast_after", "offset", "unweighted")


@hookimpl
def veomni_kernels():
    return [
        KernelSpec(
            name=f"kernel_{number}_{n}",
            op_name="rms_norm",
            variant=VARIANTS[n % 4],
            factory="nowhere:kernel",
            hardware=HardwareRequirement("cuda", min_compute_capability=80),
        )
        for n in range({kernels})
    ]
"""


def median_process_seconds(arguments: list[str], repeats: int, environment: dict[str, str] | None = None) -> float:
    environment = {**os.environ, **(environment or {})}
    run = partial(subprocess.run, arguments, check=True, capture_output=True, env=environment)
    return statistics.median(seconds(run, repeats))


def measure_import(repeats: int) -> dict[str, Any]:
    bare = median_process_seconds([sys.executable, "-c", "pass"], repeats)
    ours = median_process_seconds([sys.executable, "-c", "import veomni_core"], repeats)
    listing = median_process_seconds([sys.executable, "-m", "veomni_core.cli", "list"], repeats)
    return {"import above bare Python, ms": 1e3 * (ours - bare), "veomni list, ms": 1e3 * listing}


def measure_discovery(counts: tuple[int, ...], kernels: int) -> dict[str, Any]:
    """Seconds to discover, configure and plan, in a fresh process, with generated plugins of ``kernels`` each."""
    script = (
        "import time; start = time.perf_counter()\n"
        "from veomni_core import OpsConfig, Site, discover, plan_sites\n"
        "registry = discover({})\n"
        "config = OpsConfig.from_dict({'preset': 'auto'}, registry, environ={})\n"
        "sites = tuple(Site('rms_norm', f'layers.{i}.norm', 'norm modules', 'standard', '') for i in range(200))\n"
        "plan = plan_sites(sites, config, hardware='h200')\n"
        "print(time.perf_counter() - start, sum(len(p.kernels) for p in registry.plugins if p.healthy))"
    )
    medians = {}
    for count in counts:
        folder = Path(tempfile.mkdtemp())
        try:
            for number in range(count):
                _write_plugin(folder, number, kernels)
            environment = {**os.environ, "PYTHONPATH": str(folder)}
            runs = []
            for _ in range(5):
                done = subprocess.run(
                    [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment
                )
                taken, found = done.stdout.split()
                assert int(found) >= count * kernels, f"{found} kernels found"
                runs.append(float(taken))
            medians[str(count)] = statistics.median(runs)
        finally:
            shutil.rmtree(folder)
    return medians


def _write_plugin(folder: Path, number: int, kernels: int) -> None:
    module = f"generated_plugin_{number}"
    source = PLUGIN_SOURCE.replace("{number}", str(number)).replace("{kernels}", str(kernels))
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: generated-plugin-{number}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[veomni.plugins]\ngenerated-{number} = {module}\n")


def measure_sites() -> dict[str, Any]:
    """find_sites and plan_sites on a 48-layer Qwen3-MoE with the sizes of Qwen3-30B-A3B, on meta; and bind, twice."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from veomni_core import OpsConfig, bind, find_sites, plan_sites
    from veomni_transformers.memory.proof_memory import forget_proofs

    config = Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        output_router_logits=True,
    )

    def build() -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    model = build()
    ops = OpsConfig.from_dict({"preset": "auto"})
    gc.collect()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (first,) = seconds(lambda: plan_sites(find_sites(model, ops.registry), ops), repeats=1, warm_ups=0)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    forget_proofs()
    tracemalloc.start()
    plan = plan_sites(find_sites(model, ops.registry), ops)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sites = sum(len(op.sites) for op in plan.ops)
    forget_proofs()
    models = [build() for _ in range(6)]
    bound = [seconds(partial(bind, each, {"preset": "auto"}), repeats=1, warm_ups=0)[0] for each in models]
    return {
        "seconds": first,
        "first bind, s": bound[0],
        "second bind, s": statistics.median(bound[1:]),
        "peak Python MB": peak / 1e6,
        "resident MB": resident / 1e3,
        "sites": sites,
    }


def measure_coverage() -> dict[str, Any]:
    """Seconds to find, prove and plan the sites of every causal model type of the installed transformers."""
    from veomni_core import discover
    from veomni_transformers.coverage import cover, model_types

    built = [model for model in cover(model_types("causal"), discover()) if not model.problem]
    slowest = max(built, key=lambda model: model.find_seconds)
    return {
        "seconds": sum(model.find_seconds for model in built),
        "model types": len(built),
        "slowest": slowest.model_type,
        "slowest, s": slowest.find_seconds,
    }


class PropertySlot:
    """The slot design that a bound site is compared with: a property that decides and a call that forwards."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel

    @property
    def use_non_eager_impl(self) -> bool:
        return self._kernel is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernel(*args, **kwargs)


def measure_dispatch(rounds: int) -> dict[str, Any]:
    """Nanoseconds of one call of a norm module: bound by us, calling the kernel itself, and through a property slot."""
    import torch
    from torch import nn

    from veomni_core.sites.site import Site
    from veomni_transformers.norms.rms_norm import NormModules

    def kernel(x: Any, weight: Any, eps: float) -> Any:
        return x

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: Any) -> Any:
            return kernel(x, self.weight, self.eps)

    slot = PropertySlot(kernel)

    class Slotted(Direct):
        def forward(self, x: Any) -> Any:
            if slot.use_non_eager_impl:
                return slot(x, self.weight, self.eps)
            return x

    model = nn.Sequential(Direct())
    site = Site("rms_norm", "0", "norm modules", "standard", "", detail={"eps": 1e-6})
    for change in NormModules().install(model, site, kernel, None):
        change.apply()
    contenders = {"bound": model[0], "direct": Direct(), "property slot": Slotted()}
    x = torch.ones(2, 8)

    def call_often(module: nn.Module) -> None:
        for _ in range(2000):
            module(x)

    turns = {name: partial(call_often, module) for name, module in contenders.items()}
    times = seconds_in_turns(turns, rounds, warm_ups=0)
    medians = {name: 1e9 * statistics.median(values) / 2000 for name, values in times.items()}
    return {
        **{f"{name}, ns a call": value for name, value in medians.items()},
        "bound / direct": medians["bound"] / medians["direct"],
        "property slot / direct": medians["property slot"] / medians["direct"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    start_up, discovery = measure_import(repeats), measure_discovery((50, 100, 200), 20)
    sites, coverage, dispatch = measure_sites(), measure_coverage(), measure_dispatch(60)
    rows = [
        ("`import veomni_core`, above bare Python", f"{start_up['import above bare Python, ms']:.0f} ms", "< 60 ms"),
        ("`veomni list`", f"{start_up['veomni list, ms']:.0f} ms", "< 400 ms"),
        *(
            (f"discover, configure and plan, {count} plugins of 20 kernels", f"{1e3 * taken:.0f} ms", limit)
            for (count, taken), limit in zip(discovery.items(), ("", "", "< 1000 ms, linear"), strict=True)
        ),
        ("find sites and plan, Qwen3-MoE of 48 layers on meta", f"{sites['seconds']:.2f} s", "< 2 s"),
        (
            "find, prove, plan and bind the same, the second model of its type in a process",
            f"{1e3 * sites['second bind, s']:.0f} ms, after {sites['first bind, s']:.2f} s for the first",
            "<= 150 ms",
        ),
        ("the same, growth of the process, imports included", f"{sites['resident MB']:.0f} MB", "< 100 MB"),
        (
            f"find sites and plan, all {coverage['model types']} causal model types, one after the other",
            f"{coverage['seconds']:.1f} s, the slowest ({coverage['slowest']}) {coverage['slowest, s']:.2f} s",
            "< 60 s",
        ),
        ("a bound norm / a module calling the kernel itself", f"{dispatch['bound / direct']:.3f}", "<= 1.05"),
        ("a property-and-call slot / the same", f"{dispatch['property slot / direct']:.3f}", "for comparison"),
    ]
    write_results(
        "core",
        "What the core costs",
        {
            "start-up": start_up,
            "discovery, s": discovery,
            "sites": sites,
            "coverage": coverage,
            "dispatch": dispatch,
            "machine": machine(),
        },
        ("what", "measured", "to reach"),
        rows,
        script=__file__,
    )


if __name__ == "__main__":
    main()
