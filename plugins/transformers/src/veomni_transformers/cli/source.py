"""``veomni explain MODEL --source PATH``: the forward that runs at a module of a bound model, and transformers' own."""

from __future__ import annotations

import difflib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_core.cli.output import HardwareName
from veomni_core.discovery.discover import discover
from veomni_core.errors import ConfigError, did_you_mean
from veomni_core.tables import fit

if TYPE_CHECKING:
    from veomni_core.planning.plan import Plan


def source(
    model: Annotated[str, typer.Argument(help="A job's YAML, or a model type (qwen3_moe), bound by preset: auto.")],
    path: Annotated[str, typer.Argument(help="The module's path (model.layers.0.mlp); . for the model itself.")],
    hardware: HardwareName = None,
) -> None:
    """Print the forward that runs at PATH after binding, and how it differs from transformers' own."""
    built, plan = _bound(model, hardware)
    where = "" if path == "." else path
    known = [name for name, _ in built.named_modules()]
    if where not in known:
        raise ConfigError(f"--source: {type(built).__name__} has no module {path}. {did_you_mean(path, known[1:])}")
    for line in said(built.get_submodule(where), where, plan):
        print(line)


def said(module: Any, path: str, plan: Plan) -> Iterator[str]:
    """The lines about one module: what is bound there, the code that runs, and the difference."""
    from veomni_core.changes.bound_subclass import eager_class
    from veomni_transformers.proving.functions import code_layers, current_forward

    kind = eager_class(type(module))
    yield fit(f"{path or 'the model'}: {kind.__module__}.{kind.__qualname__}")
    for op in plan.ops:
        for site in op.sites:
            if site.site.path == path:
                yield fit(f"  {op.op_name}/{site.site.variant or '?'}: {site.kernel or 'eager'}")
    own = list({layer.__code__: layer for layer in code_layers(_upstream(kind).forward)}.values())
    layers = list({layer.__code__: layer for layer in code_layers(current_forward(module))}.values())
    layers = [layer for layer in layers if not layer.__module__.startswith("veomni_core.")]  # which watch the binding
    for layer in tuple(layers):
        layers += [each for each in _rebound(layer).values() if isinstance(each, FunctionType) and each not in layers]
    yield "\nWhat runs, from the outside in:"
    config = getattr(module, "config", None)
    now = []
    for layer in layers:
        code = [*_held(layer, getattr(config, "_attn_implementation", None)), *_lines(layer)]
        yield from ("", f"# {_place(layer)}", *code)
        now += code
    yield f"\nThe difference from {_place(own[-1])}:\n"
    before = [line for layer in own for line in (*_held(layer, "eager"), *_lines(layer))]
    difference = list(difflib.unified_diff(before, now, "transformers", "bound", lineterm=""))
    yield from difference or ["none: the code is transformers' own"]


def _bound(model: str, hardware: str | None) -> tuple[Any, Plan]:
    """The model on the meta device, bound as the job says."""
    from veomni_core.binding.bind import apply_proven_plan
    from veomni_core.planning.config import OpsConfig
    from veomni_core.planning.planner import make_plan
    from veomni_transformers.build import build_skeleton
    from veomni_transformers.cli.job_plan import checked_job

    registry = discover()
    if Path(model).suffix in (".yaml", ".yml"):
        checked = checked_job(Path(model), (), hardware, registry)
        skeleton, config, target = checked.skeleton(), checked.config, checked.hardware
    else:
        skeleton, config = build_skeleton({"model_type": model}), OpsConfig.of({"preset": "auto"})
        target = registry.named_hardware(hardware) if hardware else registry.detect_hardware()
    plan = make_plan(skeleton, config, hardware=target)
    options = {"on_change": config.on_change, "training_logits": config.training_logits}
    apply_proven_plan(skeleton, plan, registry, verify=False, **options)
    return skeleton, plan


def _upstream(kind: Any) -> Any:
    """transformers' own class, where ``kind`` is of a generated file."""
    from veomni_transformers.generated_modeling import RECORD

    record = getattr(inspect.getmodule(kind), RECORD, None)
    return kind if record is None else getattr(importlib.import_module(record["source_module"]), kind.__name__, kind)


def _place(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}, line {function.__code__.co_firstlineno}"


def _held(function: FunctionType, attention: str | None) -> list[str]:
    """The functions and plain values that ``function`` closes over, slots that it finds filled, and its attention."""
    closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    held = {name: cell.cell_contents for name, cell in closed.items()} | _rebound(function)
    if attention and "ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names:
        eager = function.__globals__.get("eager_attention_forward")
        held["the attention"] = function.__globals__["ALL_ATTENTION_FUNCTIONS"].get(attention, eager)
    named = {name: _named(value) for name, value in held.items()}
    return [f"#   {name} is {value}" for name, value in named.items() if value]


def _rebound(function: FunctionType) -> dict[str, Any]:
    """The globals that ``function`` uses, where they are not those of its module."""
    globally = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    home = vars(importlib.import_module(function.__module__))
    return {name: value for name, value in globally.items() if value is not None and home.get(name) is not value}


def _named(value: Any) -> str:
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value) if isinstance(value, (bool, int, float, str)) or type(value).__name__ == "OpSlot" else ""


def _lines(function: FunctionType) -> list[str]:
    return textwrap.dedent(inspect.getsource(function.__code__)).splitlines()
