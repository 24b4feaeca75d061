"""One expert-parallel MoE layer on two GPUs: dispatch, experts and combine, by the engine and by alltoall_dedup.

    torchrun --standalone --nproc_per_node=2 benchmarks/sharded/token_dispatch.py --name token_dispatch_layer_2_h200

Qwen3-MoE's widths in bf16, 16384 tokens a GPU, 8 choices of 128 experts that are drawn at random. Forward and backward
of the experts module, without its router. Contenders take turns on layers with the same weights. Before they are timed,
the result and the gradients of tokens and routing weights are compared with those of transformers' own code, and the
bytes that leave a GPU are counted. ``--smoke`` tries all of it with tiny sizes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.sharded import engine_models
from benchmarks.sharded.contenders import DISPATCH, EP, Contender, dispatchers
from benchmarks.sharded.ranks import (
    DEVICE,
    held_gb,
    is_first,
    peak_gb,
    process_group,
    reset_peak,
    say,
    slowest_milliseconds,
    total,
)
from benchmarks.sharded.sent import SentBytes
from benchmarks.shared.accuracy import relative_error
from benchmarks.shared.measuring import drop_gradients
from benchmarks.shared.results import machine, write_results
from benchmarks.whole_models.contenders import MODELS

TOKENS = 16384
ALLOWED = 2e-2  # bf16 rounds a product's operands to 4e-3, and the two ways round at different places
THEIRS, ENGINE = "transformers", "our experts, the engine's dispatch"
COLUMNS = (
    "contender",
    "ms (least to most)",
    "speed",
    "MB sent by a GPU",
    "bytes",
    "peak GB beyond the weights",
    "result off by",
    "gradients off by",
)


def contenders(tokens: int) -> dict[str, Contender]:
    experts = {"preset": "eager", "moe_implementation": "fused_triton" if DEVICE == "cuda" else "grouped_mm"}
    bounded = {"kernel": "alltoall_dedup", "options": {"max_tokens": tokens}}
    return {
        THEIRS: Contender(EP),
        ENGINE: Contender(EP, {**experts, DISPATCH: "eager"}),
        "our experts, alltoall_dedup": Contender(EP, {**experts, DISPATCH: "alltoall_dedup"}),
        f"our experts, alltoall_dedup, max_tokens {tokens}": Contender(EP, {**experts, DISPATCH: bounded}),
    }


class Layer:
    """The experts of one contender, and what they are called with."""

    def __init__(self, contender: Contender, config: Any, tokens: int) -> None:
        self.model = engine_models.build(config, contender.layout)  # held: FSDP2's hooks refer to it weakly
        self.kernels = contender.prepare(self.model)
        self.experts = self.model.model.layers[0].mlp.experts
        generator = torch.Generator(DEVICE).manual_seed(100 + torch.distributed.get_rank())
        draw = partial(torch.randn, device=DEVICE, generator=generator)
        shape = (tokens, config.hidden_size)
        scores, self.index = draw(tokens, config.num_experts).topk(config.num_experts_per_tok)
        self.hidden = draw(shape).bfloat16().requires_grad_()
        self.weights = scores.softmax(dim=-1).bfloat16().requires_grad_()
        self.upstream = draw(shape).bfloat16()

    def step(self) -> Tensor:
        """Forward and backward."""
        drop_gradients([self.hidden, self.weights, *self.experts.parameters()])
        result: Tensor = self.experts(self.hidden, self.index, self.weights)
        result.backward(self.upstream)
        return result.detach()


def outcome(layer: Layer) -> dict[str, Any]:
    """A step's result and gradients, and what it sent and held."""
    layer.step()
    drop_gradients([layer.hidden, layer.weights, *layer.experts.parameters()])
    held = held_gb()
    reset_peak()
    with SentBytes() as sent:
        result = layer.step()
    found = {
        "bytes sent": total(torch.tensor(sent.bytes)) / torch.distributed.get_world_size(),
        "all-to-alls": sent.calls,
        "peak GB": peak_gb() - held,
        "norm": engine_models.gradient_norm(layer.experts),
    }
    assert layer.hidden.grad is not None and layer.weights.grad is not None
    tensors = {"result": result, "dhidden": layer.hidden.grad.clone(), "dweights": layer.weights.grad.clone()}
    return {"figures": found, "tensors": tensors}


def distances(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """On the rank that is the furthest off, relative in norm."""
    world = torch.distributed.get_world_size()
    off = {
        name: total(torch.tensor(relative_error(tensor, wanted["tensors"][name].double()))) / world
        for name, tensor in found["tensors"].items()
    }
    return {**off, "dexperts, in norm": abs(found["figures"]["norm"] / wanted["figures"]["norm"] - 1)}


def write(name: str | None, data: dict[str, Any]) -> None:
    figures = data["contenders"]
    ours, rows = figures[ENGINE], []
    for what, each in figures.items():
        if "ms" not in each:
            continue
        off = each["off"]
        rows.append(
            (
                what,
                f"{each['ms']:.2f} ({min(each['times ms']):.2f} to {max(each['times ms']):.2f})",
                f"{ours['ms'] / each['ms']:.2f}x",
                f"{each['bytes sent'] / 1e6:.1f}",
                f"{each['bytes sent'] / ours['bytes sent']:.2f}x",
                f"{each['peak GB']:.2f}",
                f"{off['result']:.1e}",
                f"{max(value for key, value in off.items() if key != 'result'):.1e}",
            )
        )
    note = "\n".join(f"- {what} skipped: {each['skipped']}" for what, each in figures.items() if "skipped" in each)
    title = f"One expert-parallel MoE layer on {data['GPUs']} GPUs: {data['tokens']} tokens a GPU, bf16"
    if name:
        write_results(name, title, data, COLUMNS, rows, note, script=__file__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--name", help="the result file to write; none without it")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on CPUs too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = MODELS["qwen3-moe"]()
    config.num_hidden_layers, config.vocab_size, tokens = 1, 1024, TOKENS
    if options.smoke:
        config, tokens = engine_models.tiny(config), 64
    failed = False
    with process_group():
        layers, figures = {}, {}
        for name, contender in contenders(tokens).items():
            if reason := contender.missing():
                figures[name] = {"skipped": reason}
                say(f"{name} skipped: {reason}; installed: {sorted(dispatchers())}")
                continue
            layers[name] = Layer(contender, config, tokens)
        wanted = outcome(layers[THEIRS])
        for name, layer in layers.items():
            found = outcome(layer)
            off = distances(found, wanted)
            wrong = not max(off.values()) <= ALLOWED
            failed |= wrong
            figures[name] = {**found["figures"], "off": off, "kernels": layer.kernels}
            say(f"{'WRONG: ' if wrong else ''}{name}: {figures[name]}")
        steps = {name: layer.step for name, layer in layers.items()}
        for name, times in slowest_milliseconds(steps, options.repeats, warm_ups=5).items():
            figures[name] |= {"times ms": times, "ms": statistics.median(times)}
            say(f"{name}: {figures[name]['ms']:.2f} ms")
        sizes = {key: getattr(config, key) for key in ("hidden_size", "moe_intermediate_size", "num_experts")}
        data = {"machine": machine(), "tokens": tokens, "GPUs": torch.distributed.get_world_size(), **sizes}
        if is_first():
            write(options.name, {**data, "contenders": figures})
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown, which then aborts
