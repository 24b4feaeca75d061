"""Trains by verl's own TrainingWorker and PPO loss, on two ranks of a CPU, its model sharded by FSDP2.

``verl_training.py NAME MODEL [bound] [packed] [bf16] [liger]``: losses, gradient norms, log-probabilities and
the parameters at the end go to ``NAME.json`` and ``NAME.pt``. verl knows no CPU, so ``verl_platform`` stands in for its
platform of a GPU; nothing else of verl is replaced.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from veomni_core.errors import VeOmniError

STEPS, RANKS, PROMPT, RESPONSE = 6, 2, 5, 7


def batches(rank: int) -> Any:
    """Rollouts of four rows, with left and right padding, whose log-probabilities were a little other ones."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(3, 64, (4, PROMPT + RESPONSE), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(4):
            mask[row, : row % 3], mask[row, PROMPT + 4 + row :] = 0, 0
        data = TensorDict(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
                "prompts": ids[:, :PROMPT],
                "responses": ids[:, PROMPT:],
                "response_mask": mask[:, PROMPT:],
                "old_log_probs": -4 + 0.1 * torch.randn(4, RESPONSE, generator=generator),
                "advantages": torch.randn(4, RESPONSE, generator=generator),
            },
            batch_size=4,
        )
        data = left_right_2_no_padding(data)
        tensordict_utils.assign_non_tensor(
            data, temperature=0.8, global_batch_size=4 * RANKS, calculate_entropy=True, use_dynamic_bsz=False
        )
        yield data


def train(rank: int, name: str, model: str, asked: tuple[str, ...], port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["VERL_ENGINE_VENDOR"] = "veomni" if "bound" in asked else "verl"
    sys.modules["trl"] = None  # type: ignore[assignment]  # verl wants an older one than is here, or none
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    # verl registers its own for GPUs alone.
    EngineRegistry.register("language_model", "fsdp2", "cpu", vendor="verl")(FSDPEngineWithLMHead)
    settings = {"ppo_micro_batch_size_per_gpu": 2, "rollout_n": 1, "strategy": "fsdp2"}
    actor = FSDPActorConfig(**settings, entropy_coeff=0.01)
    dtype = "bf16" if "bf16" in asked else "fp32"
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=model,
                external_lib="veomni_engine" if "bound" in asked else None,
                override_config={"attn_implementation": "sdpa"},
                use_remove_padding="packed" in asked,
                use_liger="liger" in asked,
                enable_gradient_checkpointing=True,
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                use_torch_compile=False,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=2,
                infer_micro_batch_size_per_gpu=4,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-2, optimizer="SGD", weight_decay=0.0),
            checkpoint_config=CheckpointConfig(),
        )
    )
    try:
        worker.reset()
    except VeOmniError as error:
        said = {"error": type(error).__name__, "message": str(error)}
        Path(f"{name}.error.json").write_text(json.dumps(said), encoding="utf-8")
        return
    worker.set_loss_fn(partial(ppo_loss, actor))
    rows = []
    for data in batches(rank):
        metrics = worker.train_batch(data)["metrics"]
        rows.append([metrics["loss"], metrics["grad_norm"]])
    scored = worker.infer_batch(next(batches(rank)))
    state = {key: value.full_tensor() for key, value in worker.engine.module.state_dict().items()}
    if rank == 0:
        said = {"measured": rows, "engine": type(worker.engine).__name__}
        Path(f"{name}.json").write_text(json.dumps(said), encoding="utf-8")
        torch.save({"state": state, "logprobs": [row[:-1] for row in scored["log_probs"].unbind()]}, f"{name}.pt")


def main(name: str, model: str, *asked: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    arguments = (name, model, asked, port)
    multiprocessing.start_processes(train, arguments, RANKS, start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
