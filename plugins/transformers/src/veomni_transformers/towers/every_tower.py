"""Where a model is sharded, a tower without input runs on its smallest input at zero weight, if others have inputs.

FSDP2 gathers a tower's weights where the tower runs. If one rank's batch has an image and another's has none, the
ranks wait for each other in different collectives: they hang, or mix tensors. So each step begins with an exchange of
which kinds of inputs there are, and a rank without an input that another rank has runs the tower too, at the same place
in its forward. The result is multiplied by zero: the loss and all gradients of text are what they are without it, and
the tower's weights get gradients of zero, which are averaged with the others'. Where no rank has an input no tower
runs. Where a model's forward calls its towers itself, all that it runs only for such an input runs so.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from veomni_core.binding.model_rules import WholeModelRule
from veomni_core.changes.change import Change, ForwardChange
from veomni_core.changes.transformation import Transformation, transformations_reaching
from veomni_core.discovery.registry import Registry
from veomni_core.errors import BindingError, ConfigError
from veomni_core.planning.plan import Plan
from veomni_transformers.proving.functions import current_forward
from veomni_transformers.towers.feature_calls import FeatureCall, feature_calls, read_tensors, with_added
from veomni_transformers.towers.own_calls import ALONE, FLOW, OwnCall, own_calls
from veomni_transformers.towers.parts import towers
from veomni_transformers.towers.smallest_input import Inputs, smallest_input

_EMBEDDINGS = "get_input_embeddings"
_Found = tuple[Inputs | tuple[OwnCall, ...], str]
_FOUND: weakref.WeakKeyDictionary[nn.Module, dict[FeatureCall, _Found]] = weakref.WeakKeyDictionary()


class EveryTowerRule(WholeModelRule):
    """What a binding does in models of images, video and audio. It shows only in steps of a sharded model."""

    def changes(self, model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
        """Forwards that run a tower without input where another rank has one."""
        yield from _changes(model)


class EveryTower(Transformation):
    """What :func:`run_every_tower` returns."""

    name = "every tower"

    def describe(self) -> str:
        return "where the model is sharded, a tower without input runs at zero weight if another rank has one"


def run_every_tower(model: nn.Module) -> EveryTower:
    """Let each rank of a sharded ``model`` run a tower that another rank has an input for.

    A bound model does it by itself. ``model`` may be sharded before or after; transformers' engine and ``fully_shard``
    both will do. All ranks must call the model equally often, as FSDP2 asks anyway.

    Returns:
        The transformation, with :meth:`~veomni_core.changes.transformation.Transformation.undo`.

    Raises:
        BindingError: ``model`` does it already, or has no tower that is found to run without an input.

    Example:
        >>> from transformers import AutoConfig, Qwen3VLForConditionalGeneration
        >>> with torch.device("meta"):
        ...     model = Qwen3VLForConditionalGeneration(AutoConfig.for_model("qwen3_vl"))
        >>> state = run_every_tower(model)
        >>> state.active, state.undo(), state.active
        (True, None, False)
    """
    if any(isinstance(each, EveryTower) for each in transformations_reaching(model)):
        raise BindingError("this model runs every tower already: undo() that first")
    applied = EveryTower(model)
    changes = [(path, EveryTower.name, change) for path, change in _changes(model)]
    own = [(path, call) for path, calls in feature_calls(model) for call in calls if call.why_not]
    whys = [f"{call.why_not}: {why}" for path, call in own if (why := _found(model.get_submodule(path), call)[1])]
    if whys or not changes:
        raise BindingError(
            f"{type(model).__name__} has no tower that can run without an input ({(*whys, 'none is called')[0]}). Give "
            "every rank an input of each kind in each step"
        )
    applied.apply(changes)
    return applied


def _changes(model: nn.Module) -> Iterator[tuple[str, Change]]:
    for path, calls in list(feature_calls(model)):
        module = model.get_submodule(path)
        yield path, ForwardChange(module, with_every_tower(current_forward(module), calls))


def with_every_tower(forward: Callable[..., Any], calls: Sequence[FeatureCall]) -> Callable[..., Any]:
    """``forward``, a model's function of ``self``, in which the methods of ``calls`` run on all ranks or on none."""
    parameters = list(inspect.signature(forward).parameters)[1:]

    @wraps(forward)
    def in_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.distributed.is_initialized() or (mesh := _mesh_of(self)) is None:
            return forward(self, *args, **kwargs)
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        here = [given.get(call.argument) is not None for call in calls]
        some, every = _exchanged(here, mesh)
        absent = [call for call, on_some, on_every in zip(calls, some, every, strict=True) if on_some and not on_every]
        if not absent:
            return forward(self, *args, **kwargs)
        inputs = {call: _input_of(self, call) for call in absent}  # on all ranks, so that all raise what one raises
        if any(call.why_not for call in absent):
            left = [call for call in absent if given.get(call.argument) is None]
            with _before_others(self, [each for call in left for each in inputs[call]]):
                return forward(self, **given)
        order = [(call, is_here) for call, is_here, on_some in zip(calls, here, some, strict=True) if on_some]
        return _Step(self, order, inputs).run(forward, given)

    return in_step


class _Step:
    """One forward of ``module``, in which calls that are not made run in their place among those that are."""

    def __init__(
        self, module: Any, order: Sequence[tuple[FeatureCall, bool]], inputs: dict[FeatureCall, Inputs]
    ) -> None:
        self._module, self._left, self._inputs = module, list(order), inputs

    def run(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        """The forward. For as long as it runs, the module's methods are others in its instance, past guards."""
        embed = self._module.get_input_embeddings()
        embedding = _Embedding(embed, self.with_zeros)
        parts = [each for each in self._module.modules() if isinstance(each, PreTrainedModel)]
        around = [each for each in parts if any(part is embed for part in each.modules())]
        instead: list[tuple[nn.Module, str, Any]] = [(each, _EMBEDDINGS, lambda: embedding) for each in around]
        for call, is_here in self._left:
            if is_here:
                method = self._watched(call.method, getattr(self._module, call.method))
                instead.append((self._module, call.method, method))
        before = [vars(each).get(name) for each, name, _ in instead]
        for each, name, method in instead:
            vars(each)[name] = method
        try:
            if given.get("inputs_embeds") is not None:
                given = {**given, "inputs_embeds": self.with_zeros(given["inputs_embeds"])}
            return forward(self._module, **given)
        finally:
            for (each, name, _), own in zip(instead, before, strict=True):
                vars(each).pop(name)
                if own is not None:
                    vars(each)[name] = own

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            output = method(*args, **kwargs)
            if self._left and self._left[0][0].method == name:
                call, _ = self._left.pop(0)
                return self.with_zeros(output, call.field)
            return output

        return watched

    def with_zeros(self, output: Any, field: str = "") -> Any:
        """``output``, of whose fields ``field`` is read, with the zeros of the calls to come that are not made."""
        while self._left and not self._left[0][1]:
            call, _ = self._left.pop(0)
            output = with_added(output, field, self._zero(call))
        return output

    def _zero(self, call: FeatureCall) -> Tensor:
        kinds = towers(self._module).values()
        weight = next(each for kind in kinds for each in _weights(self._module, kind))
        inputs = {name: value.to(weight.device) for name, value in self._inputs[call].items()}
        inputs[call.argument] = inputs[call.argument].to(weight.dtype)
        method = getattr(type(self._module), call.method).__get__(self._module)
        zero: Tensor = _Zero.apply(*read_tensors(method(**inputs), call.field))
        return zero


class _Before(nn.Module):
    """Stands for ``part`` in a step, and runs ``first`` before it, whose zero is added to what the part gives.

    ``first`` is given what the part is given.
    """

    def __init__(self, part: nn.Module, first: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.part = part
        self._first = [first]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        zeros = [self._first.pop()(read_tensors([*args, *kwargs.values()], ""))] if self._first else []
        output = self.part(*args, **kwargs)
        for zero in zeros:
            named = output.items() if isinstance(output, ModelOutput) else ()
            field = next((name for name, each in named if read_tensors(each, "")), "")
            output = with_added(output, field, zero)
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)


@contextmanager
def _before_others(module: nn.Module, calls: Sequence[OwnCall]) -> Iterator[None]:
    """While it is open, ``module`` makes ``calls`` at zero weight, each in its place."""
    places: list[tuple[dict[str, Any], str, str]] = []
    for before in dict.fromkeys(each.before for each in calls):
        parent, _, name = before.rpartition(".")
        places.append((vars(module.get_submodule(parent))["_modules"], name, before))
    parts = {each.path: module.get_submodule(each.path) for each in calls}

    zeros: dict[str, Tensor] = {}

    def zero_before(before: str, given: list[Tensor]) -> Tensor:
        if given:
            zeros[FLOW] = _Zero.apply(given[0])
        for call in (each for each in calls if each.before == before):
            zeros[ALONE] = _Zero.apply(*call.run(parts[call.path], zeros))
        return zeros[ALONE]

    own = [children[name] for children, name, _ in places]
    for (children, name, before), part in zip(places, own, strict=True):
        children[name] = _Before(part, partial(zero_before, before))
    try:
        yield
    finally:
        for (children, name, _), part in zip(places, own, strict=True):
            children[name] = part


class _Embedding:
    """The embeddings of words, whose output gets zeros added."""

    def __init__(self, embed: nn.Module, add: Callable[[Tensor], Tensor]) -> None:
        self._embed, self._add = embed, add

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._add(self._embed(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embed, name)


class _Zero(torch.autograd.Function):
    """Zero, whatever the tensors hold; each of them gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros_like(each) for each in ctx.saved_tensors)


def _weights(module: nn.Module, paths: Sequence[str]) -> Iterator[Tensor]:
    for path in paths:
        yield from (each for name, each in module.named_parameters() if f"{name}.".startswith(f"{path}."))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mesh_of(module: nn.Module) -> Any:
    """The mesh over which a part of ``module`` is sharded; ``None`` if none is."""
    for each in module.modules():
        for parameter in each._parameters.values():
            if isinstance(parameter, DTensor):
                return parameter.device_mesh
    state: Any = next((each._get_fsdp_state() for each in module.modules() if isinstance(each, FSDPModule)), None)
    group = getattr(state, "_fsdp_param_group", None)
    return None if group is None else group.mesh_info.mesh


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _exchanged(here: Sequence[bool], mesh: Any) -> tuple[list[bool], list[bool]]:
    """Which inputs some rank of ``mesh`` has, and which all have. It waits for the device."""
    flags = torch.tensor([here, [not each for each in here]], dtype=torch.int32, device=mesh.device_type)
    for dimension in range(mesh.ndim):
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dimension))
    some, missing = flags.bool().tolist()
    return some, [not each for each in missing]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _input_of(module: nn.Module, call: FeatureCall) -> Any:
    inputs, why_not = _found(module, call)
    if why_not:
        raise ConfigError(
            f"in this step some ranks have {call.argument} and others have none, and {type(module).__name__} is "
            f"sharded: its tower must run on all of them, and can't run without an input ({why_not}). "
            f"Give every rank {call.argument} in such a step, or none"
        )
    return inputs


def _found(module: nn.Module, call: FeatureCall) -> _Found:
    found = _FOUND.setdefault(module, {})
    if call not in found:
        found[call] = own_calls(module, call) if call.why_not else smallest_input(module, call)
    return found[call]
