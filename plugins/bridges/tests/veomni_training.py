"""Trains a tiny Qwen3-MoE that VeOmni builds: ``veomni_training.py NAME JOB.yaml [SCRIPT]``.

The script is run first. The loss and the norm of the gradients of each step go to ``NAME.json``.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import torch
import yaml
from transformers import Qwen3MoeConfig
from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.models import build_foundation_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],  # a layer with a plain MLP, and one with experts
    "output_router_logits": True,
}


def main(name: str, job: str, *scripts: str) -> None:
    for script in scripts:
        runpy.run_path(script)
    written = yaml.safe_load(Path(job).read_text(encoding="utf-8"))["model"]["ops_implementation"]
    ops = OpsImplementationConfig(**written)
    config = Qwen3MoeConfig(**SIZES, architectures=["Qwen3MoeForCausalLM"])
    torch.manual_seed(0)
    model = build_foundation_model(
        config, torch_dtype="float32", attn_implementation="eager", init_device="cpu", ops_implementation=ops
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(3, 64, (2, 13), generator=torch.Generator().manual_seed(1))
    measured = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        measured += [float(loss.detach()), float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))]
        optimizer.step()
        optimizer.zero_grad()
    Path(f"{name}.json").write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
