"""Forward and backward of whole models on one GPU: transformers, compiled, Liger's own patch, and our presets.

    python benchmarks/train_step.py

A Llama of the 1B shape, and a Qwen3-MoE of the released model's widths with 4 of its layers; random bf16 weights, 16384
tokens as 4 sequences of 4096 and as one of 16384. Each contender runs in a process of its own, since Liger's patch and
``torch.compile`` change the whole process. After the timing the same process trains 50 steps on Python's own sources,
from weights drawn with one seed, and the losses are compared. Writes ``docs/benchmarks/train_step_h200.json``, ``.md``
and, for the losses, ``.svg``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from results import FOLDER, machine, write_results

MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama-1b": lambda: LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=32768,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        norm_topk_prob=True,
        output_router_logits=True,
        max_position_embeddings=32768,
    ),
}
TOKENS, SEQUENCES = 16384, (4096, 16384)
LOSS_SEQUENCE, LOSS_BATCH, LOSS_STEPS = 1024, 4, 50
THEIRS = "transformers"


def _compile(model: PreTrainedModel) -> None:
    model.compile()


def _liger(model: PreTrainedModel) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # Its experts search for minutes before their first step, so the model keeps its own.
    experts = {"swiglu": False} if model.config.model_type == "qwen3_moe" else {}
    _apply_liger_kernel_to_instance(model, **experts)


def _bound(**ops: str) -> Callable[[PreTrainedModel], None]:
    def bind_model(model: PreTrainedModel) -> None:
        from veomni_core import bind

        print(bind(model, ops).receipt.table(), file=sys.stderr)

    return bind_model


# The GPU preset asks for flash_attention_2, which is not built for every version of PyTorch.
CONTENDERS: dict[str, Callable[[PreTrainedModel], None]] = {
    THEIRS: lambda model: None,
    "transformers, compiled": _compile,
    "Liger's own patch": _liger,
    "preset: gpu, flash_attention_4": _bound(preset="gpu", attn_implementation="flash_attention_4"),
    "preset: auto": _bound(preset="auto"),
    "preset: auto, fused_quack": _bound(preset="auto", moe_implementation="fused_quack"),
    "preset: auto, fused_triton": _bound(preset="auto", moe_implementation="fused_triton"),
}


def contenders_of(model: str, skipped: Iterable[str]) -> list[str]:
    """By name; those that choose the experts' kernel only where there are experts."""
    has_experts = hasattr(MODELS[model](), "num_experts")
    return [name for name in CONTENDERS if name not in skipped and (has_experts or "fused_" not in name)]


def build(name: str) -> PreTrainedModel:
    """The model with weights of one seed, attention by ``sdpa``."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.train()


def step(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """One forward and backward; gives the loss."""
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def timed(model: PreTrainedModel, sequence: int, repeats: int = 8) -> dict[str, Any]:
    """The median of ``repeats`` steps after three, with the peak of the allocator's memory, weights included."""
    ids = torch.randint(0, model.config.vocab_size, (TOKENS // sequence, sequence), device="cuda")
    for _ in range(3):
        step(model, ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step(model, ids)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "ms": statistics.median(times),
        "low ms": min(times),
        "high ms": max(times),
        "tokens/s": 1e3 * TOKENS / statistics.median(times),
        "peak GB": torch.cuda.max_memory_allocated() / 1e9,
    }


def batches() -> Iterator[Tensor]:
    """The bytes of Python's own sources, in order, as token ids."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    size = LOSS_BATCH * LOSS_SEQUENCE
    for at in range(0, size * LOSS_STEPS, size):
        yield torch.tensor(list(text[at : at + size]), device="cuda").view(LOSS_BATCH, LOSS_SEQUENCE)


def losses(model: PreTrainedModel) -> list[float]:
    """The losses of 50 steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    for ids in batches():
        found.append(step(model, ids))
        optimizer.step()
    return [float(loss) for loss in found]


def measure(model_name: str, contender: str, sequences: list[int]) -> dict[str, Any]:
    """Everything that is said of one contender, in this process."""
    transformers.logging.set_verbosity_error()
    model = build(model_name)
    CONTENDERS[contender](model)
    found: dict[str, Any] = {str(sequence): timed(model, sequence) for sequence in sequences}
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return {**found, "losses": losses(model)}


def measure_in_a_process(model: str, contender: str, sequences: list[int], limit: int) -> dict[str, Any]:
    """:func:`measure` in a process of its own; what went wrong instead, where something did."""
    command = [sys.executable, __file__, "--once", model, contender, "--sequences", *map(str, sequences)]
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"not through after {limit} s"}
    if result.returncode:
        return {"failed": f"ended with exit code {result.returncode}"}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def rows(data: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The table: one line per model, length and contender."""
    for model, contenders in data["models"].items():
        baseline = contenders[THEIRS]
        if "failed" in baseline:
            continue
        for length in map(str, SEQUENCES):
            for name, found in contenders.items():
                if length not in found:
                    continue
                this, theirs = found[length], baseline[length]
                yield (
                    model,
                    f"{TOKENS // int(length)}x{length}",
                    name,
                    f"{this['ms']:.0f} ({this['low ms']:.0f} to {this['high ms']:.0f})",
                    f"{this['tokens/s']:,.0f}",
                    f"{this['peak GB']:.1f}",
                    f"{theirs['ms'] / this['ms']:.2f}x",
                    f"{this['peak GB'] / theirs['peak GB']:.2f}x",
                    f"{largest_difference(found['losses'], baseline['losses']):.2g}",
                )


def largest_difference(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def plot(data: dict[str, Any], path: Path) -> None:
    """The losses of every contender over the steps, one panel per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(data["models"]), squeeze=False)[0]
    for axes, (model, contenders) in zip(panels, data["models"].items(), strict=True):
        for name, found in contenders.items():
            if "losses" in found:
                axes.plot(found["losses"], label=name, linewidth=1)
        axes.set(title=model, xlabel="step", ylabel="loss")
        axes.legend()
    figure.savefig(path)


def write(name: str, data: dict[str, Any]) -> None:
    """The page of what has been measured so far."""
    plot(data, FOLDER / f"{name}.svg")
    failed = [
        f"- {model}, {contender}: {found['failed']}"
        for model, contenders in data["models"].items()
        for contender, found in contenders.items()
        if "failed" in found
    ]
    note = "\n".join(["Ratios are to transformers in the same run. Peaks include weights and gradients.", "", *failed])
    note += f"\n\n![losses of {LOSS_STEPS} steps]({name}.svg)"
    columns = ("model", "batch", "kernels", "ms (least to most)", "tokens/s", "peak GB")
    write_results(
        name,
        "Forward and backward of whole models, bf16",
        data,
        (*columns, "speed", "memory", f"largest loss difference in {LOSS_STEPS} steps"),
        list(rows(data)),
        note,
        script="train_step.py",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out, by their names")
    parser.add_argument("--sequences", nargs="+", type=int, default=list(SEQUENCES))
    parser.add_argument("--limit", type=int, default=400, help="seconds for one contender")
    parser.add_argument("--name", default="train_step_h200")
    parser.add_argument("--once", nargs=2, metavar=("MODEL", "CONTENDER"), help="print one's figures as JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure(*options.once, options.sequences)))
        return
    data: dict[str, Any] = {"machine": machine(), "models": {}}
    for model in options.models:
        contenders = data["models"].setdefault(model, {})
        for contender in contenders_of(model, options.skip):
            # Compiling takes a minute per length, so it is done for the first alone.
            sequences = options.sequences[:1] if contender == "transformers, compiled" else options.sequences
            found = contenders[contender] = measure_in_a_process(model, contender, sequences, options.limit)
            print(
                f"{model}, {contender}: { {key: value for key, value in found.items() if key != 'losses'} }", flush=True
            )
            write(options.name, data)


if __name__ == "__main__":
    main()
