"""Ulysses sequence parallelism over the GPUs of one host: the same gradients as one GPU, and how fast.

Start it with ``torchrun --standalone --nproc_per_node=N benchmarks/attention/ulysses.py [--name PAGE]``.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.attention.flops import causal_flops
from benchmarks.shared.accuracy import relative_error
from benchmarks.shared.measuring import seconds
from benchmarks.shared.results import machine, write_results
from veomni_core import Hardware, bind
from veomni_flash_attn.plugin import veomni_kernels
from veomni_ops.attention import AttentionModule
from veomni_transformers.sequence import (
    apply_ulysses,
    gather_heads_scatter_seq,
    scatter_attention_heads,
    slice_input_tensor,
)

LENGTH, Q_HEADS, K_HEADS, WIDTH = 65536, 32, 8, 128
COLUMNS = ("attention, forward+backward", "GPUs", "sequence", "ms", "TFLOP/s of each GPU", "tokens/s of all")
SPECS = {spec.name: spec for spec in veomni_kernels()}
# The last is how far losses and gradients may be off.
TRAINED_WITH = (
    ("sdpa", torch.float32, 1e-3),
    ("flash_attention_2", torch.bfloat16, 5e-2),
    ("flash_attention_3", torch.bfloat16, 5e-2),
    ("flash_attention_4", torch.bfloat16, 5e-2),
)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@functools.cache
def kernel() -> Any:
    return SPECS["flash_attention_4"].load()


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel()(AttentionModule(Q_HEADS // K_HEADS), q, k, v, None)[0]


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = scatter_attention_heads(q, k, v)
    return gather_heads_scatter_seq(alone(q, k, v), head_dim=2, seq_dim=1)


def exchange_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both exchanges of an attention, without it; the gradients are exchanged too."""
    q, k, v = scatter_attention_heads(q, k, v)
    output = q.transpose(1, 2).contiguous() + 0 * (k.sum() + v.sum())
    return gather_heads_scatter_seq(output, head_dim=2, seq_dim=1)


def heads(length: int, seed: int = 0) -> list[Tensor]:
    """The same on every rank; ``[1, H, S, D]`` as a projection gives them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    return [torch.randn(1, length, count, WIDTH, **options).transpose(1, 2) for count in (Q_HEADS, K_HEADS, K_HEADS)]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [each.detach().requires_grad_() for each in tensors]


def gradients_are_exact(length: int) -> dict[str, float]:
    """This rank's part of output and gradients against one GPU's, as norms; ``again`` is one GPU against itself."""
    whole, again = leaves(heads(length)), leaves(heads(length))
    upstream = torch.randn(1, length, Q_HEADS, WIDTH, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    upstream = upstream.bfloat16()
    mine = leaves([slice_input_tensor(each, 2) for each in heads(length)])
    outputs = (alone(*whole), alone(*again), shared(*mine))
    for output, part in zip(outputs, (upstream, upstream, slice_input_tensor(upstream, 1)), strict=True):
        output.backward(part)
    found = {"output": relative_error(outputs[2], slice_input_tensor(outputs[0], 1))}
    for name, one, other, part in zip("qkv", whole, again, mine, strict=True):
        wanted = slice_input_tensor(one.grad, 2)
        found[f"d{name}"] = relative_error(part.grad, wanted)
        found[f"d{name} again"] = relative_error(slice_input_tensor(other.grad, 2), wanted)
    for name, value in found.items():
        if not value < 1e-2:
            raise SystemExit(f"{name}: off by {value:.1e}")
    return found


def milliseconds(attention: Attention, given: list[Tensor], repeats: int = 8) -> float:
    """The median of forward and backward, of the slowest rank each time; the ranks start together."""
    upstream = torch.randn(1, given[0].shape[2], Q_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    return slowest(lambda: torch.autograd.grad(attention(*given), given, upstream), repeats)


def slowest(run: Callable[[], Any], repeats: int) -> float:
    def start_together() -> None:
        torch.cuda.synchronize()
        distributed.barrier()

    mine = seconds(run, repeats, warm_ups=2, before=start_together, wait=torch.cuda.synchronize)
    of_all = torch.tensor(mine, device="cuda")
    distributed.all_reduce(of_all, distributed.ReduceOp.MAX)
    return 1000 * statistics.median(of_all.tolist())


def training(sp_size: int, kernel: str, dtype: torch.dtype, steps: int = 5) -> dict[str, float]:
    """Losses, and gradients of the first step, of sp x FSDP2 over all GPUs against one GPU with every batch."""
    world = distributed.get_world_size()
    mesh = init_device_mesh("cuda", (world // sp_size, sp_size), mesh_dim_names=("dp", "sp"))
    reference, model = (build(kernel, dtype) for _ in range(2))
    apply_ulysses(model, mesh["sp"].get_group())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (reference, model)]
    worst_loss, worst_gradient = 0.0, 0.0
    for step in range(steps):
        batches = [batch(step * mesh["dp"].size() + each) for each in range(mesh["dp"].size())]
        losses = [reference(input_ids=ids, labels=ids, use_cache=False).loss for ids in batches]
        torch.stack(losses).mean().backward()
        place = mesh["dp"].get_local_rank()
        loss = model(input_ids=batches[place], labels=batches[place]).loss
        loss.backward()
        worst_loss = max(worst_loss, abs(loss.item() / losses[place].item() - 1))
        if step == 0:
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            worst_gradient = max(relative_error(mine.grad.full_tensor(), wanted.grad) for mine, wanted in pairs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"loss": worst_loss, "gradient": worst_gradient}


def build(kernel: str, dtype: torch.dtype) -> Any:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=4096,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).cuda().train()
    bind(model, {"preset": "eager", "attn_implementation": kernel})
    return model


def batch(seed: int) -> Tensor:
    return torch.randint(0, 4096, (1, 4096), generator=torch.Generator().manual_seed(seed)).cuda()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", help="the result file to write; none without it")
    arguments = parser.parse_args()
    name = arguments.name
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    ranks, first = distributed.get_world_size(), distributed.get_rank() == 0
    say: Callable[[str], None] = (lambda text: print(text, flush=True)) if first else (lambda text: None)

    exact = gradients_are_exact(8192)
    say(f"sp={ranks} against one GPU, S=8192: {', '.join(f'{key} {value:.1e}' for key, value in exact.items())}")

    share = LENGTH // ranks
    parts = leaves([slice_input_tensor(each, 2) for each in heads(LENGTH)])
    cases = {
        f"Ulysses, sp={ranks}": (shared, parts, ranks, LENGTH),
        "its exchanges, with a copy": (exchange_only, parts, ranks, LENGTH),
        "one GPU, the same tokens per GPU": (alone, leaves(heads(share)), 1, share),
        "one GPU, the same sequence": (alone, leaves(heads(LENGTH)), 1, LENGTH),
    }
    rows, figures = [], []
    for what, (attention, given, gpus, length) in cases.items():
        took = milliseconds(attention, given)
        flops = 0.0 if attention is exchange_only else causal_flops([length], Q_HEADS, WIDTH)
        each = flops / gpus / took / 1e9
        figures.append({"what": what, "GPUs": gpus, "length": length, "ms": took, "TFLOP/s of each": each})
        rows.append((what, f"{gpus}", f"{length}", f"{took:.2f}", f"{each:.0f}", f"{length / took * 1000:,.0f}"))
        say(f"{what}: {took:.2f} ms, {each:.0f} TFLOP/s of each GPU")
    ulysses, _, same_share, same_sequence = (figure["TFLOP/s of each"] for figure in figures)
    ratios = {
        f"of {ranks} times the FLOP/s of one GPU with the same tokens per GPU": ulysses / same_share,
        f"of {ranks} times the FLOP/s (and tokens/s) of one GPU with the same sequence": ulysses / same_sequence,
    }
    for what, value in ratios.items():
        say(f"{value:.1%} {what}")

    trained = {}
    for sp_size in sorted({2, ranks} if ranks > 1 else {1}):
        for kernel, dtype, bound in TRAINED_WITH:
            if kernel in SPECS and (unmet := SPECS[kernel].hardware.unmet(Hardware.detect())):
                say(f"not {kernel}: {'; '.join(unmet)}")
                continue
            found = training(sp_size, kernel, dtype)
            what = f"sp={sp_size} x FSDP2 over {ranks} GPUs, {kernel}, {dtype}".replace("torch.", "")
            say(f"{what}: loss off by {found['loss']:.1e}, gradients by {found['gradient']:.1e} of one GPU's")
            if not max(found.values()) < bound:
                raise SystemExit(f"{what}: wrong")
            trained[what] = found

    if name and first:
        title = f"Ulysses on {ranks} GPUs: causal attention, {Q_HEADS}/{K_HEADS} heads of {WIDTH}, bf16"
        data = {
            "machine": machine(),
            "figures": figures,
            "ratios": ratios,
            "against one GPU": exact,
            "training": trained,
        }
        write_results(name, title, data, COLUMNS, rows, script=__file__)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
