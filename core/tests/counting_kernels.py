"""Kernels that compute each op's reference and count their calls, so that a test sees which kernel ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from planned_norms import vouching
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec
from veomni_core.discovery.registry import PluginRecord, Registry, build_registry
from veomni_ops.catalog import OPS
from veomni_ops.contract import contract_for

calls: Counter[tuple[str, str, str]] = Counter()


def _counting(op_name: str, variant: str, name: str) -> Callable[..., Any]:
    op = next(op for op in OPS if op.name == op_name)
    reference = contract_for(op, variant).reference

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a graph that counts would be compiled anew at every count
            calls[(op_name, variant, name)] += 1
        return reference(*args, **kwargs)

    return kernel


def __getattr__(attribute: str) -> Any:
    """``counting__<op>__<variant>__<name>`` is such a kernel, made once."""
    if not attribute.startswith("counting__"):
        raise AttributeError(attribute)
    kernel = globals()[attribute] = _counting(*attribute.removeprefix("counting__").split("__"))
    return kernel


def counting_registry(*names: str, ops: tuple[str, ...] = ()) -> Registry:
    """The core's ops, with one counting kernel per name and variant (attention aside, which returns a tuple)."""
    specs = [
        KernelSpec(
            name,
            op.name,
            variant,
            f"{__name__}:counting__{op.name}__{variant}__{name}",
            preference=50 - rank,
            expert_parallel=op.name == "moe_experts",
            features=("lora",) if op.name == "moe_experts" else (),
        )
        for rank, name in enumerate(names)
        for op in OPS
        for variant in op.variants
        if op.name != "attention" and (not ops or op.name in ops)
    ]
    record = PluginRecord("counting", "veomni-counting", "1.0", __name__, kernels=tuple(specs))
    return vouching(build_registry([*definitions(), record], {}), *specs, distribution="veomni-counting")
