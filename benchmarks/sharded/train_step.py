"""Forward and backward of a whole model that transformers' engine shards over two GPUs, its own code and bound.

    torchrun --standalone --nproc_per_node=2 benchmarks/sharded/train_step.py qwen3-moe --name sharded_qwen3_moe_2_h200
    torchrun --standalone --nproc_per_node=2 benchmarks/sharded/train_step.py llama-1b --name sharded_llama_tp_2_h200
    torchrun --standalone --nproc_per_node=2 benchmarks/sharded/train_step.py qwen3-vl-2b --name sharded_qwen3_vl_2_h200

The models of ``whole_models``: Qwen3-MoE's widths with 4 layers, under FSDP2 and under FSDP2 with expert parallelism,
and a Llama of the 1B shape under tensor parallelism; random bf16 weights, the same for each contender. Each rank with a
batch of its own has 4 sequences of 4096 tokens. A whole Qwen3-VL of 2B is sharded by torch's ``fully_shard``: its ranks
have 2 sequences with a picture of 1024x1024 in each, or one rank has them and the other has words alone. That hangs or
aborts in transformers' own code, so the comparison is then with it as ``run_every_tower`` changes it. No optimizer
runs. Contenders take turns, in two rounds. Before one is timed, its loss and the norm of its gradient are compared with
those of transformers' own code. Writes ``benchmarks/results/<name>.json`` after each contender. ``--smoke`` tries all
of it with tiny sizes.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.sharded import engine_models
from benchmarks.sharded.contenders import CONTENDERS, Contender, baseline
from benchmarks.sharded.page import write
from benchmarks.sharded.ranks import (
    DEVICE,
    held_gb,
    is_first,
    peak_gb,
    problems,
    process_group,
    reset_peak,
    say,
    slowest_milliseconds,
    total,
)
from benchmarks.shared.results import machine
from benchmarks.whole_models.contenders import MODELS
from benchmarks.whole_models.image_inputs import SIDE, inputs_of
from benchmarks.whole_models.train_step import Inputs, step

SEQUENCES, LENGTH = 4, 4096
# How far the loss and the norm of the gradient may be from transformers' own, relative: bf16 rounds to 4e-3.
LOSS_OFF, NORM_OFF = 2e-3, 2e-2


def inputs_here(model: Any, contender: Contender, batch: str, side: int) -> Inputs:
    """Random ones, other ones on each rank with a batch of its own."""
    number = engine_models.batch_number(model)
    torch.manual_seed(number)
    return inputs_of(model, batch, side=0 if contender.one_has_pictures and number else side)


def first_step(model: PreTrainedModel, inputs: Inputs) -> dict[str, float]:
    """The loss of all batches, and the norm of its gradient."""
    loss = step(model, inputs)
    return {"loss": total(loss) / torch.distributed.get_world_size(), "norm": engine_models.gradient_norm(model)}


def measure(config: Any, contender: Contender, batch: str, side: int, repeats: int) -> dict[str, Any]:
    """One round of one contender, on a model of its own, with pictures of ``side`` pixels."""
    held = held_gb()
    model = engine_models.build(config, contender.layout)
    runs = contender.prepare(model)
    inputs = inputs_here(model, contender, batch, side)
    first = first_step(model, inputs)
    call = partial(step, model, inputs)
    slowest_milliseconds({"": call}, repeats=1, warm_ups=2)
    reset_peak()
    times = slowest_milliseconds({"": call}, repeats, warm_ups=0)[""]
    peak = peak_gb()
    return {
        "times ms": times,
        "tokens": engine_models.batches(model) * inputs["input_ids"].numel(),
        "peak GB": peak,
        "held before GB": held,
        "kernels": runs,
        **first,
    }


def compared(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """How far a contender is from transformers' own, and whether that is too far."""
    off = {f"{what} off": abs(found[what] / wanted[what] - 1) for what in ("loss", "norm")}
    if off["loss off"] <= LOSS_OFF and off["norm off"] <= NORM_OFF:  # a NaN is not right
        return off
    return {**off, "wrong": f"loss off by {off['loss off']:.1e}, gradient's norm by {off['norm off']:.1e}"}


def measured(contender: Contender, *arguments: Any) -> dict[str, Any]:
    """:func:`measure`, or why there is nothing to say of this contender."""
    if reason := contender.missing():
        return {"skipped": reason}
    found, failure = {}, ""
    try:
        found = measure(arguments[0], contender, *arguments[1:])
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    torch._dynamo.reset()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    if failures := problems(failure):
        return {"failed": "; ".join(failures)}
    return found


def joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Both rounds of a contender."""
    if "times ms" not in before or "times ms" not in now:
        return before if "times ms" in before else now
    return {
        **now,
        "times ms": before["times ms"] + now["times ms"],
        "peak GB": max(before["peak GB"], now["peak GB"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(CONTENDERS))
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out, by their names")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--name", help="the result file to write; none without it")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on CPUs too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sequences = SEQUENCES // 2 if hasattr(MODELS[options.model](), "vision_config") else SEQUENCES
    length, side = (32, 64) if options.smoke else (LENGTH, SIDE)
    contenders: dict[str, Any] = {}
    with process_group():
        for turn in range(options.rounds):
            for name, contender in CONTENDERS[options.model].items():
                if name in options.skip or (turn and (contender.compiled or "times ms" not in contenders[name])):
                    continue
                config = MODELS[options.model]()
                config = engine_models.tiny(config) if options.smoke else config
                found = measured(contender, config, f"{sequences}x{length}", side, options.repeats)
                theirs = contenders.get(baseline(options.model, name), found)
                if "times ms" in found and "times ms" in theirs:
                    found |= compared(found, theirs)
                contenders[name] = joined(contenders.get(name, {}), found)
                say(f"{name}: {found}")
                if is_first() and options.name:
                    data = {"machine": machine(), "model": options.model, "tokens a batch": [sequences, length]}
                    write(options.name, {**data, "contenders": contenders}, __file__)
    if any("wrong" in each or "failed" in each for each in contenders.values()):
        say(f"FAILED or WRONG: {[name for name, each in contenders.items() if 'wrong' in each or 'failed' in each]}")
        sys.exit(1)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown, which then aborts
