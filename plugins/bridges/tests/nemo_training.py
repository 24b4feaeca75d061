"""Trains with NeMo-AutoModel's loss components on two ranks of a CPU, a model of transformers sharded by FSDP2.

``nemo_training.py NAME MODEL [bound]``: losses go to ``NAME.json``, the parameters at the end to ``NAME.pt``. The steps
are those of its recipe's ``_forward_backward_step``, which is not run itself: it wants GPUs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nemo_automodel.components.loss.loss import build_loss_module
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss
from tiny_training import llama, qwen3_moe
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard

from veomni_bridges.nemo_automodel import KernelCrossEntropy
from veomni_core import bind

RANKS, STEPS = 2, 6


def train(rank: int, name: str, model_name: str, bound: bool, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = {"model": llama, "experts": qwen3_moe}[model_name]()
    model.config.output_router_logits = False
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if bound:  # as after recipe.setup()
        bind(model, {"preset": "auto", "cross_entropy_loss_implementation": "eager"})
    loss_fn = build_loss_module(KernelCrossEntropy if bound else MaskedCrossEntropy)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(3, 64, (2, 13), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, -rank - 3 :] = -100
        more = {"logits_to_keep": 1, "output_hidden_states": True} if bound else {}
        out = model(input_ids=ids[:, :-1], **more)
        loss = calculate_loss(
            loss_fn,
            logits=out.logits,
            labels=labels,
            model=model,
            hidden_states=out.hidden_states[-1] if bound else None,
            num_label_tokens=2 * 2 * 12 - 7,  # of both ranks
            grad_reduce_group=dist.group.WORLD,
        )
        (loss * RANKS).backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
    state = {key: value.full_tensor() for key, value in model.state_dict().items()}
    if rank == 0:
        Path(f"{name}.json").write_text(json.dumps(losses), encoding="utf-8")
        torch.save(state, f"{name}.pt")


def main(name: str, model: str, *asked: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(train, (name, model, "bound" in asked, port), RANKS, start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
