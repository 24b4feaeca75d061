"""What is measured of a sharded model: the engine's own code, and kernels bound on it, in each layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from veomni_core import bind
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.discovery.discover import discover

FSDP, EP, TP = {"fsdp_size": 2}, {"fsdp_size": 2, "ep_size": 2}, {"tp_size": 2}
DISPATCH = "token_dispatch_implementation"


@dataclass(frozen=True)
class Contender:
    """One way to run a model.

    Args:
        layout: the fields of transformers' ``DistributedConfig``.
        ops: what ``bind`` is given; ``None`` leaves the model as the engine made it.
        compiled: whether the model is compiled then. It is measured in one round alone: compiling takes minutes.
    """

    layout: Mapping[str, int]
    ops: Mapping[str, Any] | None = None
    compiled: bool = False

    def missing(self) -> str:
        """Why this checkout or installation can't run it; empty if it can."""
        asked = (self.ops or {}).get(DISPATCH, EAGER)
        name = asked if isinstance(asked, str) else asked["kernel"]
        return "" if name == EAGER or name in dispatchers() else f"no installed plugin has the {name} of token_dispatch"

    def prepare(self, model: Any) -> dict[str, str]:
        """Bind and compile; gives what runs, by op."""
        found = {} if self.ops is None else kernels(bind(model, known(self.ops)).plan)
        if self.compiled:
            model.compile()
        return found


def dispatchers() -> set[str]:
    """The kernels of token_dispatch that are installed."""
    registry = discover()
    return {spec.name for spec in registry.kernels("token_dispatch")} if "token_dispatch" in registry.ops else set()


def known(ops: Mapping[str, Any]) -> dict[str, Any]:
    """``ops`` without the dispatcher where there is no such op, so that the engine's own runs."""
    return {name: value for name, value in ops.items() if name != DISPATCH or "token_dispatch" in discover().ops}


def kernels(plan: Any) -> dict[str, str]:
    """``{"rms_norm": "triton (9 of 9)"}`` of a plan."""
    found = {}
    for op in plan.ops:
        names = Counter(site.kernel for site in op.sites)
        if names:
            found[op.op_name] = ", ".join(f"{name} ({count} of {len(op.sites)})" for name, count in names.items())
    return found


THEIRS = {"qwen3-moe": "transformers, FSDP2 and EP", "llama-1b": "transformers, TP"}
CONTENDERS: dict[str, dict[str, Contender]] = {
    "qwen3-moe": {
        THEIRS["qwen3-moe"]: Contender(EP),
        "transformers, FSDP2": Contender(FSDP),
        "preset: auto, FSDP2": Contender(FSDP, {"preset": "auto"}),
        "preset: auto, FSDP2 and EP, the engine's dispatch": Contender(EP, {"preset": "auto", DISPATCH: "eager"}),
        "preset: auto, FSDP2 and EP, alltoall_dedup": Contender(EP, {"preset": "auto", DISPATCH: "alltoall_dedup"}),
        "transformers, FSDP2 and EP, compiled": Contender(EP, compiled=True),
    },
    "llama-1b": {
        THEIRS["llama-1b"]: Contender(TP),
        "preset: auto, TP": Contender(TP, {"preset": "auto"}),
    },
}
