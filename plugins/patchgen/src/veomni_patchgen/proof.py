"""Whether a generated model still computes what upstream's does: the loss, and every gradient, of a tiny model."""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from veomni_patchgen.config import PatchConfig
from veomni_patchgen.errors import PatchError
from veomni_patchgen.generation import generate
from veomni_transformers.generated_modeling import generated_class
from veomni_transformers.jobs.model_config import load_model_config

TOLERANCE = 1e-5
"""How far, of a tensor's largest value, a gradient may be from upstream's. The models compute in float64; parts of
upstream's code round to float32."""


@dataclass(frozen=True)
class Proof:
    """How far a generated model is from upstream's.

    Attributes:
        gradients: how many were compared.
        farthest: the largest distance, of the loss or a gradient, relative to its largest value.
        declared: the distance with the patches that declare a change; ``None`` if none does.
    """

    gradients: int
    farthest: float
    declared: float | None = None

    def __str__(self) -> str:
        same = f"loss and {self.gradients} gradients are upstream's (farthest {self.farthest:.0e})"
        return (
            same
            if self.declared is None
            else f"{same} without the declared changes; with them {self.declared:.0e} away"
        )


def prove(config: PatchConfig, tolerance: float = TOLERANCE) -> Proof:
    """Compare the generated model with upstream's, in float64 on the CPU with the same weights.

    Patches that declare a change are left out of the comparison, and then measured.

    Raises:
        PatchError: the config has no example, or a value is farther than ``tolerance`` from upstream's.
    """
    if config.make_example is None:
        raise PatchError(f"{config.target_file}: there is no tiny model to compare: declare one with @config.example")
    made, inputs = config.make_example()
    model_config = load_model_config(made)
    declared = [patch.target for patch in config.all_patches() if patch.declares]
    upstream = importlib.import_module(config.source_module)
    with tempfile.TemporaryDirectory() as folder:
        kind = _generated(config, declared, Path(folder, "same.py"), model_config)
        wanted = _step(getattr(upstream, kind.__name__), model_config, inputs)
        distances = _distances(_step(kind, model_config, inputs), wanted)
        if far := {name: value for name, value in distances.items() if not value <= tolerance}:
            worst = max(far, key=lambda name: far[name])
            raise PatchError(
                f"{config.target_file}: the generated model computes something else: {worst} is {far[worst]:.1e} from "
                f"upstream's, and {len(far) - 1} more values. Mend the patches, or declare the change (declares=...)"
            )
        changed = None
        if declared:
            other = _generated(config, (), Path(folder, "declared.py"), model_config)
            changed = max(_distances(_step(other, model_config, inputs), wanted).values())
    return Proof(len(distances) - 1, max(distances.values()), changed)


def _generated(config: PatchConfig, without: Any, file: Path, model_config: Any) -> Any:
    file.write_text(generate(config, without=without).text, encoding="utf-8")
    return generated_class(file, model_config)


def _step(kind: Any, config: Any, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The loss, and the gradient of every parameter; zeros where one has none."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}  # those that take float64
        model = kind._from_config(copy.deepcopy(config), dtype=torch.float64, **options).train()
        for parameter in model.parameters():  # also those that are made of zeros, ones, or nothing
            torch.nn.init.normal_(parameter, std=0.1)
        torch.manual_seed(1)
        passed = {
            name: value.double() if getattr(value, "is_floating_point", bool)() else value
            for name, value in inputs.items()
        }
        loss = model(**passed).loss
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"the loss": loss.detach(), **{f"the gradient of {name}": grad for name, grad in grads.items()}}


def _distances(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, float]:
    if found.keys() != wanted.keys():
        other = ", ".join(sorted(found.keys() ^ wanted.keys())[:4])
        raise PatchError(f"the generated model has other parameters than upstream's: {other}")
    return {
        name: float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-12))
        for name, value in wanted.items()
    }
