"""What ranks must have in common besides their plan, for one run to be one run: versions, variables, the lock file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from veomni_core.discovery.installed_plugins import definition_distributions
from veomni_ops.torch_overrides import PYTHON_NATIVE, changed_overrides, code_of

# The plan names the version of each plugin that it takes a kernel from. These compute the rest of the model, and
# distributions that define ops prove its sites.
_PACKAGES = ("veomni-core", "torch", "transformers", "triton")
# What changes which code runs, or how it rounds, on a rank that has it. Paths may differ from rank to rank.
_VARIABLES = (
    "MODELING_BACKEND",
    "VEOMNI_PLUGINS",
    "VEOMNI_PLUGINS_BLOCK",
    "VEOMNI_DISABLE_PLUGIN_AUTOLOAD",
    "VEOMNI_PLUGINS_STRICT",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
    "USE_HUB_KERNELS",
)
_FILES = ("VEOMNI_FROZEN", "VEOMNI_HUB_KERNELS")


def rank_conditions() -> dict[str, str]:
    """This rank's versions of the packages that compute, variables that change how, and hashes of the files they name.

    And which of torch's operators other code replaces (:mod:`veomni_ops.torch_overrides`).

    What is not installed or not set is left out.
    """
    overrides = _overrides_in_force()
    return {**dict(_versions()), **dict(_variables()), **({PYTHON_NATIVE: overrides} if overrides else {})}


def differences(conditions: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A sentence for each rank and each condition in which it differs from the first rank.

    Example:
        >>> differences({0: {"torch": "2.13.0"}, 1: {"torch": "2.12.0", "TRITON_INTERPRET": "1"}})
        ['rank 1: TRITON_INTERPRET: not set -> 1', 'rank 1: torch: 2.13.0 -> 2.12.0']
    """
    first, *others = conditions.values()
    return [
        f"rank {rank}: {name}: {first.get(name, _nothing(name))} -> {mine.get(name, _nothing(name))}"
        for rank, mine in zip([*conditions][1:], others, strict=True)
        for name in sorted({*first, *mine})
        if first.get(name) != mine.get(name)
    ]


def _nothing(name: str) -> str:
    return "not set" if name.isupper() else "none" if name == PYTHON_NATIVE else "not installed"


def _versions() -> Iterator[tuple[str, str]]:
    for package in (*_PACKAGES, *definition_distributions()):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def _variables() -> Iterator[tuple[str, str]]:
    for name in _VARIABLES:
        if value := os.environ.get(name):
            yield name, value
    for name in _FILES:
        if value := os.environ.get(name):
            yield name, _content(Path(value))


def _overrides_in_force() -> str:
    """Every replacement of an operator, for the comparison of ranks: how many, a hash, and what was changed."""
    registry = sys.modules.get("torch._native.registry")
    if registry is None:
        return ""
    active = [  # the first of an operator's whose condition holds is called
        f"{op} {key} {node.dsl_name} {code_of(node)}"
        for (op, key), nodes in sorted(registry._graphs.items())
        for node in nodes
        if node.active and (op, key) in registry._aten_override_libs
    ]
    counted = f"{len(active)} operators ({hashlib.sha256(repr(active).encode()).hexdigest()[:8]})" if active else ""
    return ", ".join(filter(None, (counted, changed_overrides())))


def _content(path: Path) -> str:
    try:
        return f"a file of sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    except OSError:
        return "a file that can't be read"
