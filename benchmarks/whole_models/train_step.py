"""Forward and backward of a whole model on one GPU: transformers, compiled, Liger's own patch, and our presets.

    python benchmarks/whole_models/train_step.py llama-1b --name train_step_llama_1b_h200 --picture
    python benchmarks/whole_models/train_step.py qwen3-moe --name train_step_qwen3_moe_h200
    python benchmarks/whole_models/train_step.py qwen3-next --name train_step_qwen3_next_h200 --batches 2x4096 1x16384 \
        --only transformers "preset: auto"
    python benchmarks/whole_models/train_step.py qwen3-vl-2b --name train_step_qwen3_vl_h200 --batches 2x4096 \
        --without-losses

A Llama of the 1B shape, a Qwen3-0.6B, or models of real widths with some of their layers (``contenders.py``); random
bf16 weights, and by default 16384 tokens as 4 sequences of 4096 and as one of 16384; for models that take images, with
one in each sequence. Each contender runs in a process of its own, since Liger's patch and ``torch.compile`` change the
whole process. One more step is profiled: how long the GPU spends in matrix products, attention and all else. Then the
same process trains 50 steps on Python's own sources, from weights drawn with one seed, and the losses are compared.
Writes ``benchmarks/results/<name>.json`` and, with ``--picture``, the losses as ``docs/benchmarks/<name>.svg``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.gpu_kernels import kernel_times
from benchmarks.shared.measuring import event_milliseconds, warm_up
from benchmarks.shared.results import PICTURES, machine
from benchmarks.whole_models.contenders import AS_A_GRAPH, CONTENDERS, FROM_HOST, MODELS, build, contenders_of
from benchmarks.whole_models.image_inputs import inputs_of, with_positions_of
from benchmarks.whole_models.kernel_kinds import by_kind
from benchmarks.whole_models.page import plot, write
from veomni_trainer.loop.step_graphs import graphs_on

Inputs = dict[str, Tensor]
Step = Callable[[Inputs], Tensor]
BATCHES = ("4x4096", "1x16384")
LOSS_SEQUENCE, LOSS_BATCH, LOSS_STEPS = 1024, 4, 50


def step(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """One forward and backward; gives the loss."""
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach()


def step_of(model: PreTrainedModel, contender: str) -> Step:
    """:func:`step` of the model, as the trainer runs it with ``train.cuda_graphs`` where the contender is a graph."""
    if not contender.endswith(AS_A_GRAPH):
        return partial(step, model)
    graphs = graphs_on(model.device, model, accumulates=False, repeats_forwards=False)

    def replayed(inputs: Inputs) -> Tensor:
        return graphs(lambda given: {"loss": step(model, given)}, inputs)["loss"]

    return replayed


def timed(run: Step, inputs: Inputs, repeats: int = 8) -> dict[str, Any]:
    """The median of ``repeats`` steps after four, with the peak of the allocator's memory, weights included."""
    call = partial(run, inputs)
    warm_up(call)
    torch.cuda.reset_peak_memory_stats()
    call()  # the fourth, in which a graph is captured: nothing that it uses is allocated later
    times = event_milliseconds(call, repeats)
    return {
        "ms": statistics.median(times),
        "low ms": min(times),
        "high ms": max(times),
        "tokens/s": 1e3 * inputs["input_ids"].numel() / statistics.median(times),
        "peak GB": torch.cuda.max_memory_allocated() / 1e9,
    }


def texts() -> Iterator[Tensor]:
    """The bytes of Python's own sources, in order, as token ids."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    size = LOSS_BATCH * LOSS_SEQUENCE
    for at in range(0, size * LOSS_STEPS, size):
        yield torch.tensor(list(text[at : at + size]), device="cuda").view(LOSS_BATCH, LOSS_SEQUENCE)


def losses(model: PreTrainedModel, run: Step) -> list[float]:
    """The losses of 50 steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    for ids in texts():
        found.append(run({"input_ids": ids, "labels": ids}))
        optimizer.step()
    return [float(loss) for loss in found]


def measure(model_name: str, contender: str, batches: list[str], trains: bool) -> dict[str, Any]:
    """Everything that is said of one contender, in this process; without ``trains`` no losses."""
    transformers.logging.set_verbosity_error()
    model = build(model_name)
    CONTENDERS[contender](model)
    run = step_of(model, contender)
    made = with_positions_of(model) if contender.endswith(FROM_HOST) else partial(inputs_of, model)
    times = {batch: timed(run, made(batch)) for batch in batches}
    inputs = made(batches[0])
    kernels = by_kind(kernel_times(lambda: run(inputs)))
    if not trains:
        return {"batches": times, "kernels ms": kernels}
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return {"batches": times, "kernels ms": kernels, "losses": losses(model, run)}


def measure_in_a_process(model: str, contender: str, batches: list[str], limit: int, trains: bool) -> dict[str, Any]:
    """:func:`measure` in a process of its own; what went wrong instead, where something did."""
    command = [sys.executable, __file__, model, "--once", contender, "--batches", *batches]
    command += [] if trains else ["--without-losses"]
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"not through after {limit} s"}
    if result.returncode:
        return {"failed": f"ended with exit code {result.returncode}"}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out, by their names")
    parser.add_argument("--only", nargs="*", default=[], help="contenders to measure, by their names; all without it")
    parser.add_argument("--batches", nargs="+", default=list(BATCHES), metavar="SEQUENCESxLENGTH")
    parser.add_argument("--limit", type=int, default=400, help="seconds for one contender")
    parser.add_argument("--name", default="train_step")
    parser.add_argument("--without-losses", action="store_true", help="leave out the 50 steps on real text")
    parser.add_argument("--picture", action="store_true", help="also draw the losses")
    parser.add_argument("--once", metavar="CONTENDER", help="print one's figures as JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure(options.model, options.once, options.batches, not options.without_losses)))
        return
    contenders: dict[str, Any] = {}
    for contender in options.only or contenders_of(options.model, options.skip):
        # Compiling takes a minute per length, so it is done for the first alone.
        batches = options.batches[:1] if contender.endswith("compiled") else options.batches
        found = contenders[contender] = measure_in_a_process(
            options.model, contender, batches, options.limit, not options.without_losses
        )
        print(f"{contender}: { {key: value for key, value in found.items() if key != 'losses'} }", flush=True)
        write(options.name, {"machine": machine(), "model": options.model, "contenders": contenders}, __file__)
    if options.picture:
        plot(contenders, PICTURES / f"{options.name}.svg")


if __name__ == "__main__":
    main()
