"""What is measured of a sharded model: the engine's own code, and kernels bound on it, in each layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from veomni_core import bind
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.discovery.discover import discover
from veomni_transformers.towers import run_every_tower

FSDP, EP, TP = {"fsdp_size": 2}, {"fsdp_size": 2, "ep_size": 2}, {"tp_size": 2}
BY_TORCH: dict[str, int] = {}  # FSDP2 by ``fully_shard``, as accelerate does it
DISPATCH = "token_dispatch_implementation"


@dataclass(frozen=True)
class Contender:
    """One way to run a model.

    Args:
        layout: the fields of transformers' ``DistributedConfig``; empty for ``fully_shard`` alone.
        ops: what ``bind`` is given; ``None`` leaves the model as the engine made it.
        compiled: whether the model is compiled then. It is measured in one round alone: compiling takes minutes.
        every_tower: whether each rank of the unbound model runs the towers that another rank has pictures for.
        one_has_pictures: whether the first rank's batch has pictures, and no other's.
        beside: the contender that it is compared with; the model's in ``THEIRS`` if empty.
    """

    layout: Mapping[str, int]
    ops: Mapping[str, Any] | None = None
    compiled: bool = False
    every_tower: bool = False
    one_has_pictures: bool = False
    beside: str = ""

    def missing(self) -> str:
        """Why this checkout or installation can't run it; empty if it can."""
        asked = (self.ops or {}).get(DISPATCH, EAGER)
        name = asked if isinstance(asked, str) else asked["kernel"]
        return "" if name == EAGER or name in dispatchers() else f"no installed plugin has the {name} of token_dispatch"

    def prepare(self, model: Any) -> dict[str, str]:
        """Bind and compile; gives what runs, by op."""
        found = {} if self.ops is None else kernels(bind(model, known(self.ops)).plan)
        if self.every_tower:
            run_every_tower(model)
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


THEIRS = {
    "qwen3-moe": "transformers, FSDP2 and EP",
    "llama-1b": "transformers, TP",
    "qwen3-vl-2b": "transformers, FSDP2, pictures on both ranks",
}
# Without run_every_tower, transformers' ranks wait for each other, or abort.
_ONE_HAS = "transformers and run_every_tower, FSDP2, pictures on one rank"
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
    "qwen3-vl-2b": {
        THEIRS["qwen3-vl-2b"]: Contender(BY_TORCH),
        "preset: auto, FSDP2, pictures on both ranks": Contender(BY_TORCH, {"preset": "auto"}),
        _ONE_HAS: Contender(BY_TORCH, every_tower=True, one_has_pictures=True, beside=_ONE_HAS),
        "preset: auto, FSDP2, pictures on one rank": Contender(
            BY_TORCH, {"preset": "auto"}, one_has_pictures=True, beside=_ONE_HAS
        ),
    },
}


def baseline(model: str, contender: str) -> str:
    """The contender of ``model`` that ``contender`` is compared with."""
    return CONTENDERS[model][contender].beside or THEIRS[model]
