"""Trains torchtitan's Llama of debugging size, its overrides applied as its Trainer applies them.

``torchtitan_training.py NAME [OVERRIDE ...]``: the loss and the norm of the gradients of each step go to ``NAME.json``,
with the classes of the modules that were built. The word ``bind`` binds the model instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

from veomni_core import bind


def main(name: str, *overrides: str) -> None:
    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:  # FlexAttention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    named = [each for each in overrides if each != "bind"]
    apply_overrides(OverrideConfig(imports=parse_cli_imports(named)), config)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_states(buffer_device=torch.device("cpu"))
    classes = sorted({type(module).__name__ for module in model.modules()})
    bound = {}
    if "bind" in overrides:
        ops = bind(model, {"preset": "auto"}).plan.ops
        bound = {op.op_name: sum(decision.bound for decision in op.sites) for op in ops}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(32).expand(2, 32)
    measured = []
    for _ in range(4):
        logits = model(tokens[:, :-1], positions=positions)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        measured += [float(loss.detach()), float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))]
        optimizer.step()
        optimizer.zero_grad()
    result = {"measured": measured, "classes": classes, "bound": bound, "state": sorted(model.state_dict())}
    Path(f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
