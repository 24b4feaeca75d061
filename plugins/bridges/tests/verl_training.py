"""Trains by verl's own TrainingWorker and PPO loss, on two ranks of a CPU, its model sharded by FSDP2.

``verl_training.py NAME [bound]``: the model in ``NAME``'s folder ``model``. Losses, gradient norms, log-probabilities and
the parameters at the end go to ``NAME.json`` and ``NAME.pt``. verl has no platform of a CPU, so one that is a stand-in for a
GPU's is put into its registry; nothing else of verl is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

STEPS, RANKS, PROMPT, RESPONSE = 6, 2, 5, 7


def stand_in() -> None:
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    class Module:
        """What verl asks of torch.cuda."""

        is_available = staticmethod(lambda: False)
        max_memory_allocated = max_memory_reserved = memory_allocated = staticmethod(lambda *_: 0)
        empty_cache = synchronize = staticmethod(lambda *_: None)

    def nothing(self: Any, *_: Any) -> None:
        return None

    answers = {
        "device_name": "cpu",
        "vendor_name": "stand-in",
        "device_module": Module,
        "is_available": True,
        "current_device": "cpu",
        "device_count": 1,
        "communication_backend_name": "gloo",
        "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
        "ray_resource_name": "CPU",
        "ray_noset_envvars": [],
        "is_ipc_supported": False,
        "get_device_capability": (None, None),
        "nvtx_range": contextlib.nullcontext(),
    }
    made: dict[str, Any] = {}
    for name in PlatformBase.__abstractmethods__:
        own = vars(PlatformBase)[name]
        answer = (lambda value: lambda self, *_: value)(answers[name]) if name in answers else nothing
        made[name] = property(answer) if isinstance(own, property) else answer
    PlatformRegistry.register(platform="cpu")(type("PlatformCpu", (PlatformBase,), made))


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


def train(rank: int, name: str, bound: bool, packed: bool, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_VENDOR": "veomni" if bound else "verl"}
    torch.set_num_threads(1)
    stand_in()
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
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path="model",
                external_lib="veomni_engine" if bound else None,
                override_config={"attn_implementation": "sdpa"},
                use_remove_padding=packed,
                enable_gradient_checkpointing=True,
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                use_torch_compile=False,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=2,
                infer_micro_batch_size_per_gpu=4,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-2, optimizer="SGD", weight_decay=0.0),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, actor))
    rows = []
    for data in batches(rank):
        metrics = worker.train_batch(data)["metrics"]
        rows.append([metrics["loss"], metrics["grad_norm"]])
    scored = worker.infer_batch(next(batches(rank)))
    state = {key: value.full_tensor() for key, value in worker.engine.module.state_dict().items()}
    if rank == 0:
        Path(f"{name}.json").write_text(json.dumps({"measured": rows, "engine": type(worker.engine).__name__}))
        torch.save({"state": state, "logprobs": [row[:-1] for row in scored["log_probs"].unbind()]}, f"{name}.pt")


def main(name: str, *asked: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(train, (name, "bound" in asked, "packed" in asked, port), RANKS)


if __name__ == "__main__":
    main(*sys.argv[1:])
