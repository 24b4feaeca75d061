"""The layout that transformers' distributed engine gives to a model, or will give to it.

The engine's ``DistributedConfig`` and the model's own plans decide it, so it is known before any process group exists.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import transformers
from torch import nn

from veomni_core.errors import ConfigError, HostError
from veomni_core.sites.site import Site
from veomni_core.sites.walk import named_modules
from veomni_transformers.engine.engine_layout import EngineLayout

ENGINE_SINCE = "5.21"  # the first transformers with tensor, expert and FSDP2 parallelism in one DistributedConfig
_MESHES = "_mesh_manager"  # where the engine keeps the meshes of a model that it has sharded
_PLANS = ("_tp_plan", "_ep_plan", "_fsdp_plan")  # where a model keeps its own plans
_ENGINE_LOGGER = "transformers.distributed.mixin"


def refused(site: Site, styles: Mapping[str, str], why: str) -> Site:
    """``site`` without a variant, since the engine divides it by ``styles``, for the reason ``why``."""
    named = ", ".join(f"{path or 'the module'}: {style}" for path, style in sorted(styles.items()))
    return replace(site, variant=None, examined=False, evidence=f"its parameters are divided ({named}): {why}")


def layout_of(model: nn.Module) -> EngineLayout | None:
    """The layout of a model that the engine has sharded, or of a wrapper around one; ``None`` for any other model."""
    module: Any
    for path, module in named_modules(model):
        if _MESHES in vars(module):
            return _resolved(module, module.config.distributed_config, path)
    return None


def layout_for(model: nn.Module, distributed_config: Any) -> EngineLayout | None:
    """The layout that ``distributed_config`` gives to ``model``, which is whole and may be on the meta device.

    Args:
        model: a transformers model.
        distributed_config: transformers' ``DistributedConfig``, or a mapping of its fields.

    Returns:
        The layout; ``None`` if all of its sizes are 1.

    Raises:
        HostError: this version of transformers has no distributed engine.
        ConfigError: the engine refuses the sizes or plans, or they don't fit the model.
    """
    config = distributed_config_of(distributed_config)
    if config.tp_size == config.ep_size == config.dp_size == config.pp_size == 1:
        return None
    layout = _resolved(model, config, "")
    _refuse_misfits(model, layout)
    return layout


def distributed_config_of(given: Any) -> Any:
    """transformers' ``DistributedConfig``, from one or from a mapping of its fields.

    Raises:
        HostError: this version of transformers has no distributed engine.
        ConfigError: a field is unknown, or the sizes contradict each other.
    """
    require_engine()
    from transformers.distributed.configuration_utils import DistributedConfig

    if isinstance(given, DistributedConfig):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"distributed_config: expected a DistributedConfig or a mapping, not {given!r}")
    unknown = sorted(set(given) - set(DistributedConfig.__dataclass_fields__))
    if unknown:
        known = ", ".join(DistributedConfig.__dataclass_fields__)
        raise ConfigError(f"distributed_config has no {', '.join(unknown)}; its fields are {known}")
    written: Any = given.get("ep_plan")
    if hasattr(written, "ep_styles"):  # a ParallelPlan
        given = {**given, "ep_plan": written.ep_styles()}
    try:
        return DistributedConfig(**given)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"distributed_config: {error}") from error


def require_engine() -> None:
    """Raise HostError if this version of transformers has no distributed engine."""
    try:
        importlib.import_module("transformers.distributed.expert_parallel")
    except ImportError as error:
        raise HostError(
            f"sharding a model needs the distributed engine of transformers {ENGINE_SINCE} or newer; this is "
            f"transformers {transformers.__version__}"
        ) from error


def _resolved(model: Any, config: Any, prefix: str) -> EngineLayout:
    try:
        with _left_alone(model):
            tp_styles, ep_styles, _ = model._resolve_parallel_plans(config)
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"transformers can't shard {type(model).__name__} so: {error}") from error
    if config.pp_size > 1:
        raise ConfigError(
            f"pp_size is {config.pp_size}: with pipeline parallelism each rank holds other layers, and kernels are "
            "bound by one plan for all ranks. Use fsdp_size, tp_size and ep_size, or leave the model unbound"
        )
    under = f"{prefix}." if prefix else ""
    return EngineLayout(
        fsdp=config.dp_size,
        tp=config.tp_size,
        ep=config.ep_size,
        tp_styles={under + path: style for path, style in tp_styles.items()},
        ep_styles={under + path: style for path, style in ep_styles.items()},
        ep_implementation=config.ep_implementation,
    )


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Put the model's own plans back, into which the engine writes overrides, and silence what it says of them.

    The engine warns of rules that match nothing whenever plans are read. It says so again when it shards the model.
    """
    kept = {name: vars(model)[name] for name in _PLANS if name in vars(model)}
    log = logging.getLogger(_ENGINE_LOGGER)
    log.addFilter(_is_no_unused_rule)
    try:
        yield
    finally:
        log.removeFilter(_is_no_unused_rule)
        for name in _PLANS:
            vars(model).pop(name, None)
        vars(model).update(kept)


def _is_no_unused_rule(record: logging.LogRecord) -> bool:
    return "match nothing in" not in record.getMessage()


def _refuse_misfits(model: Any, layout: EngineLayout) -> None:
    """Raise for sizes with which the engine, or the model's own code on its shards, would fail later."""
    problems = []
    for path, style in layout.ep_styles.items():
        if style == "grouped_gemm" and (experts := model.get_parameter(path).shape[0]) % layout.ep:
            problems.append(f"ep_size={layout.ep} does not divide the {experts} experts of {path.rpartition('.')[0]}")
            break
    if stale := _stale_experts(model) if layout.ep > 1 else ():
        problems.append(f"its plan divides {' and '.join(stale)}, and its experts have no such parameters")
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if layout.tp > 1 and heads is not None:
        from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

        if get_kv_heads_per_rank(dict(layout.tp_styles), heads, layout.tp) is None:
            problems.append(f"tp_size={layout.tp} does not divide the {heads} key and value heads")
    if problems:
        raise ConfigError(f"distributed_config does not fit {type(model).__name__}: {'; '.join(problems)}")


def _stale_experts(model: Any) -> list[str]:
    """The parameters of experts in the model's own plan that the experts don't have, which the engine passes over."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    found = [each for each, _ in (*model.named_modules(), *model.named_parameters())]
    names = {*map(replace_layer_number_by_wildcard, found)}
    divided = [path for path, style in model.ep_plan.items() if style == "grouped_gemm" and path not in names]
    return [path for path in divided if path.rpartition(".")[0] in names]
