"""Folders in the layout of the Hub's kernels, written by the tests: pure Python packages over plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from veomni_hub.build_variants import digest_of

RIGHT = "x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)"
WRONG_GRADIENT = f"({RIGHT}.detach() + 0 * x)"

NORM = """
import torch
from torch import nn


def rms_norm(x, weight, eps):
    return weight * (NORMALISED).to(x.dtype)


class AcmeRMSNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states, scale=1.0):
        return scale * rms_norm(hidden_states, self.weight, self.variance_epsilon)


class AcmeInferenceNorm(AcmeRMSNorm):
    has_backward = False
"""

LAYER = {
    "op": "rms_norm",
    "variant": "standard",
    "layer": "AcmeRMSNorm",
    "call": {"hidden_states": "x", "self.weight": "weight", "self.variance_epsilon": "eps"},
}
FUNCTION = {
    "op": "rms_norm",
    "variant": "standard",
    "function": "rms_norm",
    "call": {"x": "x", "weight": "weight", "eps": "eps"},
}


def metadata(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a build variant of the kernel ``name``, with other ``fields``."""
    known = {"name": name, "id": f"_{name.replace('-', '_')}_1", "version": 1, "license": "Apache-2.0"}
    return {**known, "python-depends": [], "backend": {"type": "cpu"}, **fields}


def write_package(folder: Path, normalised: str = RIGHT, variant: str = "torch-universal", **fields: Any) -> Path:
    """Write ``build/<variant>`` of a package with a norm into ``folder``, and return that build variant's folder."""
    build = folder / "build" / variant
    build.mkdir(parents=True)
    (build / "__init__.py").write_text("from . import layers\nfrom .layers import rms_norm\n")
    (build / "layers.py").write_text(NORM.replace("NORMALISED", normalised))
    (build / "metadata.json").write_text(json.dumps(metadata(folder.name, fields)))
    return build


def write_file(path: Path, folder: Path, /, *kernels: dict[str, Any], name: str = "acme", **entry: Any) -> Path:
    """Write a kernel file at ``path`` with one package, with the digests of the variants that are in ``folder``."""
    digests = {build.name: digest_of(build) for build in (folder / "build").iterdir()}
    package = {"folder": folder.name, "variants": digests, "kernels": list(kernels), **entry}
    path.write_text(
        yaml.safe_dump({name: {key: value for key, value in package.items() if value is not None}}, sort_keys=False)
    )
    return path
