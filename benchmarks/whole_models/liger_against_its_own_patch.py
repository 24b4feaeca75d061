"""Small bf16 models with Liger's kernels, bound by us and patched in by Liger itself, against their eager code.

    python benchmarks/whole_models/liger_against_its_own_patch.py --name liger_against_its_own_patch_h200

Each way runs in a process of its own, since Liger's patch changes transformers' modules for all models. The weights are
drawn anew from one seed; those of the norms are not ones, or no rounding would show. Every norm is given one random
input: the share of its result's elements that differ from eager's in any bit shows whether it rounds where the model
does, of which the contract allows 3 %. Then one training step is taken, and its gradients are compared with those of
eager bf16 and of eager float32.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.results import machine, write_results
from veomni_core import bind

LIGER = {
    "rms_norm_implementation": "liger_kernel",
    "rotary_pos_emb_implementation": "liger_kernel",
    "cross_entropy_loss_implementation": "liger_kernel",
}
MODELS: dict[str, dict[str, str]] = {  # the fields that are bound; gpt-oss has its activation within its experts
    "olmo2": {**LIGER, "swiglu_mlp_implementation": "liger_kernel"},
    "gpt_oss": LIGER,
    "gemma3_text": {**LIGER, "swiglu_mlp_implementation": "liger_kernel"},
}
WAYS = {"eager": "eager", "bound": "bound by veomni", "patched": "Liger's own patch"}
ALLOWED = 0.03
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Found = dict[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_of(model_type: str) -> PreTrainedModel:
    config = CONFIG_MAPPING[model_type](**SIZES, attn_implementation="eager")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for norm in norms(model).values():
        norm.weight.data += 0.3 * torch.randn_like(norm.weight)
    return model.to(DEVICE, torch.bfloat16).train()


def norms(model: nn.Module) -> dict[str, Any]:
    return {path: m for path, m in model.named_modules() if re.search("rms_?norm", type(m).__name__, re.IGNORECASE)}


def changed(model: PreTrainedModel, model_type: str, way: str) -> PreTrainedModel:
    if way == "bound":
        bind(model, {"preset": "eager", **MODELS[model_type]})
    elif way == "patched":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    return model.float() if way == "float32" else model


def run(model_type: str, way: str) -> Found:
    """What every norm gives for a random input, and the loss and gradients of one step."""
    model = changed(model_of(model_type), model_type, way)
    results: dict[str, Tensor] = {}
    for seed, (path, norm) in enumerate(norms(model).items()):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 64, norm.weight.numel(), generator=generator).to(DEVICE, norm.weight.dtype)
        with torch.no_grad():
            results[path] = norm(3 * x).cpu()
    ids = torch.randint(3, SIZES["vocab_size"], (4, 128), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"norms": results, "loss": loss.item(), "gradients": gradients}


def run_apart(model_type: str, way: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "found.pt")
        subprocess.run([sys.executable, __file__, "--worker", model_type, way, file], check=True)
        return torch.load(file)


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all gradients together, as a share of the wanted ones' norm."""
    error = sum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted)
    return float((error / sum(float(x.double().square().sum()) for x in wanted.values())) ** 0.5)


def compare(model_type: str) -> Found:
    ways = (*WAYS, "float32")
    with ThreadPoolExecutor() as pool:  # of processes, which spend most of their time on imports
        runs = dict(zip(ways, pool.map(partial(run_apart, model_type), ways), strict=True))
    eager, exact = runs["eager"], runs["float32"]
    return {
        way: {
            "norm elements": max(
                float((found["norms"][path] != wanted).double().mean()) for path, wanted in eager["norms"].items()
            ),
            "loss": found["loss"],
            "gradients from eager": distance(found["gradients"], eager["gradients"]),
            "gradients from float32": distance(found["gradients"], exact["gradients"]),
        }
        for way, found in runs.items()
        if way in WAYS
    }


def row(model_type: str, way: str, found: Found) -> tuple[str, ...]:
    return (
        model_type,
        WAYS[way],
        f"{found['norm elements']:.1%}" + " (too many)" * (found["norm elements"] > ALLOWED),
        f"{found['loss']:.5f}",
        f"{found['gradients from eager']:.2%}",
        f"{found['gradients from float32']:.2%}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="the result file to write; none without it")
    parser.add_argument("--json", type=Path, help="a file for the figures alone")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "WAY", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        model_type, way, file = options.worker
        torch.save(run(model_type, way), file)
        return
    data: Found = {"machine": machine(), "models": {model_type: compare(model_type) for model_type in MODELS}}
    rows = [row(model_type, way, found) for model_type, ways in data["models"].items() for way, found in ways.items()]
    for line in rows:
        print(" | ".join(line))
    if options.json:
        options.json.write_text(json.dumps(data))
    if options.name:
        columns = ("model", "kernels", "elements of a norm that differ from eager, at worst", "loss")
        columns += ("gradients, distance from eager", "gradients, distance from float32")
        title = "Liger's kernels, bound by us and by its own patch, against eager code"
        write_results(options.name, title, data, columns, rows, script=__file__)


if __name__ == "__main__":
    main()
