"""Which parameters of a model are divided over ranks, along which dimension: the engine's plans, readable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from veomni_core.errors import ConfigError
from veomni_core.tables import render_table
from veomni_transformers.engine.layout import require_engine

# The dimension along which each of the engine's styles divides a weight; a bias has only the first one.
_FROM_THE_FRONT = {"grouped_gemm": 0, "embedding_rowwise": 0, "embedding_colwise": 1}
_FROM_THE_BACK = {
    "colwise": -2,
    "colwise_gather_output": -2,
    "colwise_rep": -2,
    "packed_colwise": -2,
    "rowwise": -1,
    "rowwise_rep": -1,
    "rowwise_split_input": -1,
    "packed_rowwise": -1,
}


@dataclass(frozen=True)
class ParallelPlan:
    """The parameters that expert and tensor parallelism divide, by their paths with ``*`` for the layers' numbers.

    One that is written goes over a model's own, as ``distributed_config={"ep_size": 2, "ep_plan": plan}`` or by a
    plugin's ``ModelSpec(parallel_plan=...)``. A path that matches nothing is refused by name.

    Attributes:
        extra_parallel_plan: VeOmni's name for it: ``{"ep": {path: Shard(dimension)}}``.
        tp: the same for tensor parallelism.
        shapes: the whole shapes of these parameters.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> model = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, vocab_size=64))
        >>> get_parallel_plan(model).extra_parallel_plan["ep"]["model.layers.*.mlp.experts.gate_up_proj"]
        Shard(dim=0)
    """

    extra_parallel_plan: Mapping[str, Mapping[str, Shard]]
    tp: Mapping[str, Shard] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plans = self.extra_parallel_plan
        if not isinstance(plans, Mapping) or not all(isinstance(each, Mapping) for each in plans.values()):
            raise ConfigError(f"extra_parallel_plan is {{'ep': {{path: Shard(0)}}}}, not {plans!r}")

    def ep_styles(self) -> dict[str, str]:
        """The plan for experts, as the engine writes it.

        Raises:
            ConfigError: it divides in another way than by experts, or another dimension than the first.
        """
        others = sorted({*self.extra_parallel_plan, *(["tp"] if self.tp else [])} - {"ep"})
        experts = self.extra_parallel_plan.get("ep", {})
        others += [f"{path}: {shard}" for path, shard in experts.items() if shard != Shard(0)]
        if others:
            raise ConfigError(
                f"the engine divides experts along their first dimension, Shard(0), and takes no {others[0]}; for "
                "tensor parallelism write tp_plan, a mapping from paths to its styles"
            )
        modules = (path.rpartition(".")[0] for path in experts)
        return {**dict.fromkeys(experts, "grouped_gemm"), **dict.fromkeys(modules, "ep_dispatch_experts")}

    def table(self) -> str:
        """One row for each parameter and way of dividing it."""
        ways = {**self.extra_parallel_plan, "tp": self.tp}
        rows = [
            (way, path, " x ".join(map(str, self.shapes.get(path, "-"))), str(shard.dim))
            for way, plan in ways.items()
            for path, shard in plan.items()
        ]
        return render_table(("divided by", "parameter", "shape", "dimension"), rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``{"ep": {path: dimension}, "tp": {path: dimension}}``."""
        ways = {**self.extra_parallel_plan, "tp": self.tp}
        return {way: {path: shard.dim for path, shard in plan.items()} for way, plan in ways.items()}


def get_parallel_plan(model: nn.Module) -> ParallelPlan:
    """The parameters of ``model`` that transformers' engine would divide, by the model's own plans.

    Args:
        model: a transformers model, which may be on the meta device.

    Returns:
        The plan; empty where the model has none.

    Raises:
        HostError: this version of transformers has no distributed engine.
        ConfigError: ``model`` is no transformers model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> plan = get_parallel_plan(LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64)))
        >>> plan.to_dict()["ep"], plan.to_dict()["tp"]["model.layers.*.mlp.down_proj.weight"]
        ({}, 1)
    """
    require_engine()
    if not hasattr(model, "tp_plan"):
        raise ConfigError(f"get_parallel_plan needs a transformers model, not a {type(model).__name__}")
    shapes: dict[str, tuple[int, ...]] = {}
    plans: dict[str, dict[str, Shard]] = {"ep": {}, "tp": {}}
    for way, styles in (("ep", model.ep_plan), ("tp", model.tp_plan)):
        for path, shape, style in _styled(model, styles):  # type: ignore[arg-type]
            if (dimension := _dimension(style, len(shape))) is not None:
                plans[way][path], shapes[path] = Shard(dimension), shape
    return ParallelPlan({"ep": plans["ep"]}, plans["tp"], shapes)


def _styled(model: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Each parameter that a style is for, or its module's: its path, shape and style. Layers are given once."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    seen = set()
    for name, parameter in model.named_parameters():
        path = replace_layer_number_by_wildcard(name)
        style = styles.get(path) or styles.get(path.rpartition(".")[0])
        if style is not None and path not in seen:
            seen.add(path)
            yield path, tuple(parameter.shape), style


def _dimension(style: str, dimensions: int) -> int | None:
    """The dimension along which ``style`` divides a parameter; ``None`` if every rank keeps it whole."""
    if style in _FROM_THE_FRONT:
        return _FROM_THE_FRONT[style]
    if style not in _FROM_THE_BACK or (dimensions == 1 and _FROM_THE_BACK[style] == -1):
        return None
    return max(0, dimensions + _FROM_THE_BACK[style])
