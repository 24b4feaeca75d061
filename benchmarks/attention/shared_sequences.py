"""Layers of a bound model over one long sequence: on one GPU, and shared by several, by Ulysses and by a ring.

    torchrun --standalone --nproc_per_node=2 benchmarks/attention/shared_sequences.py llama-1b --length 131072
    torchrun --standalone --nproc_per_node=2 benchmarks/attention/shared_sequences.py qwen3-next --name NAME

Two layers of Llama 1B's widths, four of Llama 8B's, and four of Qwen3-Next's; random bf16 weights, the same on every
rank; forward and backward, the loss included. Before the ways take turns, each one's loss and gradients are compared
with those of the first. Writes ``benchmarks/results/<name>.json``. ``--smoke`` tries all of it with tiny sizes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.sharded.engine_models import tiny
from benchmarks.sharded.ranks import (
    DEVICE,
    is_first,
    problems,
    process_group,
    say,
    slowest_milliseconds,
    total,
)
from benchmarks.shared.results import machine, write_results
from benchmarks.whole_models.contenders import MODELS
from veomni_core import bind
from veomni_transformers.sequence import apply_context_parallel, apply_ulysses

COLUMNS = ("model", "sequence", "way", "ms (least to most)", "speed")
ONE = "one GPU"
WAYS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    ONE: lambda model: ExitStack(),
    "Ulysses": apply_ulysses,
    "Ulysses, overlapping": partial(apply_ulysses, overlap=True),
    "ring": apply_context_parallel,
}
# How far a way's loss, and all of its gradients together, may be from another's: bf16 adds up in other orders, and
# routers then choose other experts for a few tokens.
LOSS_OFF, GRADIENTS_OFF = 2e-3, 5e-2


def llama(hidden: int, inner: int, layers: int, head_dim: int) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=head_dim,
        vocab_size=4096,
        max_position_embeddings=2**18,
    )


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-1b": lambda: llama(2048, 8192, 2, 64),
    "llama-8b": lambda: llama(4096, 14336, 4, 128),
    "qwen3-next": MODELS["qwen3-next"],
}


def step(model: Any, ids: Tensor) -> Tensor:
    """The loss after its backward."""
    model.zero_grad()
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def first_step(model: Any, ids: Tensor, shared: bool) -> list[Tensor]:
    """The loss and the gradients; of ranks that share a sequence, gradients are their mean."""
    loss = total(step(model, ids)) / distributed.get_world_size()
    gradients = [each.grad for each in model.parameters()]
    for each in gradients if shared else ():
        distributed.all_reduce(each, distributed.ReduceOp.SUM)
        each.div_(distributed.get_world_size())
    return [torch.tensor(loss), *(each.clone() for each in gradients)]


def miss(found: list[Tensor], wanted: list[Tensor]) -> dict[str, Any]:
    """How far a way is from another, and whether that is too far."""
    apart, size = (
        sum(each.float().square().sum().item() for each in tensors) ** 0.5
        for tensors in ((a - b for a, b in zip(found[1:], wanted[1:], strict=True)), wanted[1:])
    )
    off = {"loss off": abs(found[0].item() / wanted[0].item() - 1), "gradients off": apart / size}
    right = off["loss off"] <= LOSS_OFF and off["gradients off"] <= GRADIENTS_OFF  # a NaN is not
    return off if right else {**off, "wrong": True}


def measured(way: str, model: Any, ids: Tensor, repeats: int, is_new: bool) -> dict[str, Any]:
    """Times of a way, and its first step if it ``is_new``; or what any rank said against it."""
    failure, found = "", dict[str, Any]()
    try:
        with WAYS[way](model):
            if is_new:
                found["first"] = first_step(model, ids, shared=way != ONE)
            found["times ms"] = slowest_milliseconds({"": partial(step, model, ids)}, repeats, warm_ups=1)[""]
    except Exception as error:  # on all ranks, which are alike: as where memory does not suffice
        traceback.print_exc()
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    model.zero_grad(set_to_none=True)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    failures = problems(failure)
    return {"failed": "; ".join(failures)} if failures else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(CONFIGS))
    parser.add_argument("--attention", default="sdpa", help="attn_implementation")
    parser.add_argument("--length", type=int, default=65536, help="of the sequence")
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS), help="ways to measure")
    parser.add_argument("--repeats", type=int, default=4, help="timed steps of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--name", help="the result file to write; none without it")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on CPUs too")
    options = parser.parse_args()
    length = 64 if options.smoke else options.length
    ways: dict[str, dict[str, Any]] = {}
    with process_group():
        torch.manual_seed(0)
        config = CONFIGS[options.model]()
        if options.smoke:
            layers = config.num_hidden_layers  # of every kind that the model has
            config = tiny(config)
            config.num_hidden_layers = layers
        with torch.device(DEVICE):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        model.train()
        binding = bind(model, {"preset": "auto", "attn_implementation": options.attention})
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (1, length), generator=generator).to(DEVICE)
        wanted: list[Tensor] = []
        for _ in range(options.rounds):
            for way in options.only:
                before = ways.get(way, {})
                if "failed" in before:
                    continue
                found = measured(way, model, ids, options.repeats, is_new=not before)
                if first := found.pop("first", None):
                    wanted = wanted or first
                    found |= miss(first, wanted)
                elif "times ms" in found:
                    found["times ms"] = before["times ms"] + found["times ms"]
                ways[way] = {**before, **found}
                say(f"{options.model} {length} {way}: {found}")
        if is_first() and options.name:
            kernels = {each.op_name: list(each.chosen) for each in binding.plan.ops}
            data = {"machine": machine(), "model": options.model, "sequence": length, "kernels": kernels, "ways": ways}
            rows = list(table(options.model, length, ways))
            title = f"One sequence on {distributed.get_world_size()} GPUs, forward and backward, bf16"
            write_results(options.name, title, data, COLUMNS, rows, script=__file__)
    if any("wrong" in each for each in ways.values()):
        say(f"WRONG: {ways}")
        sys.exit(1)


def table(model: str, length: int, ways: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each way; speed is relative to one GPU."""
    rows = []
    alone = ways.get(ONE, {}).get("times ms")
    for way, found in ways.items():
        times = found.get("times ms")
        if times is None:
            rows.append((model, f"{length}", way, "does not run", ""))
            continue
        ms = statistics.median(times)
        speed = f"{statistics.median(alone) / ms:.2f}x" if alone else ""
        spread = f"{ms:.1f} ({min(times):.1f} to {max(times):.1f})"
        rows.append((model, f"{length}", way, spread, speed))
    return rows


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown, which then aborts
