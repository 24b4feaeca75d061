"""Ulysses whose exchanges run while an attention computes its other projections (asynchronous Ulysses).

Queries, keys and values are exchanged as soon as each is projected, and waited for where the attention's own code asks
for them. Backward does so the other way round: the three gradients are on their way before the first projection's. The
own code then computes the whole sequence for this rank's heads: it is given stand-ins for hidden states and
projections, and ``cos`` and ``sin`` of all positions. So a rotary function, and a norm of single heads, run after the
exchange. The exchange of the attention's output is waited for.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from veomni_core.changes.bound_subclass import eager_class
from veomni_transformers.attention.kernel_lookup import TABLE
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import current_forward, with_globals
from veomni_transformers.rotary.embeddings import all_handed_over, nearest
from veomni_transformers.sequence.exchange import gather_heads_scatter_seq, ranks_of
from veomni_transformers.sequence.inputs import WholeSequence
from veomni_transformers.sequence.slicing import gather_outputs

_PROJECTIONS, _OUTPUT = ("q_proj", "k_proj", "v_proj"), "o_proj"
_HIDDEN, _ANGLES = "hidden_states", "position_embeddings"
_LENGTH = 3


def overlapped_forward(
    module: nn.Module, group: ProcessGroup, whole: Callable[[], WholeSequence | None]
) -> Callable[..., Any]:
    """A forward for the attention ``module`` of this rank's positions, around its own of all positions.

    ``whole`` gives the sequence of the forward that is running, which keeps its ``cos`` and ``sin`` for all layers.
    """
    original = current_forward(module)
    names = [*inspect.signature(original).parameters][1:]

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden: Tensor = given[_HIDDEN]
        under_way = {
            name: _Start.apply(_by_rank(getattr(self, name)(hidden), heads, group.size()), group)
            for name, heads in zip(_PROJECTIONS, _heads(self), strict=True)
        }
        if given.get(_ANGLES) is not None:
            given[_ANGLES] = _of_all_positions(given[_ANGLES], group, whole())
        batch, length, width = hidden.shape
        given[_HIDDEN] = _nothing(hidden, batch, length * group.size(), width)
        arrived = {name: partial(_arrived, parts, group) for name, parts in under_way.items()}

        def output(heads: Tensor) -> Any:
            return getattr(self, _OUTPUT)(gather_heads_scatter_seq(heads, head_dim=2, seq_dim=1, group=group))

        return original(_WithProjections(self, {**arrived, _OUTPUT: output}), **given)

    return forward


def why_not_overlapped(model: nn.Module, paths: Iterable[str], ranks: int) -> Iterator[str]:
    """Why the own code of the attention modules at ``paths`` can't compute all positions for some of the heads.

    It is run in small copies, with random projections of all heads and of each rank's: the results must be the same,
    also where the hidden states hold nothing. One reason for each class.
    """
    with probe.seeded():
        handed_over, refused = all_handed_over(model), set()
        for path in paths:
            module = model.get_submodule(path)
            kind = type(module).__name__
            if kind in refused or not (why := _why_not(module, nearest(path, handed_over), ranks)):
                continue
            refused.add(kind)
            yield f"the exchanges of {path} ({kind}) can't overlap with its projections: {why}"


def _why_not(module: Any, angles: Iterable[Any], ranks: int) -> str:
    linears: list[Any] = [getattr(module, name, None) for name in (*_PROJECTIONS, _OUTPUT)]
    widths: list[int] = [each.out_features for each in linears[:3] if hasattr(each, "out_features")]
    if len(widths) < len(_PROJECTIONS) or linears[-1] is None:
        return f"it has no linear projections {', '.join((*_PROJECTIONS, _OUTPUT))}"
    heads, twin = _heads(module), _twin(module)
    if any(width % number for width, number in zip(widths, heads, strict=True)):
        return f"its projections are {widths} wide, which its {heads[0]} and {heads[1]} heads don't divide"
    why = "its rotary embedding gives no cos and sin"
    for each in angles:
        if each is None or (isinstance(each, tuple) and all(isinstance(part, Tensor) for part in each)):
            results, error = probe.attempt(partial(_by_heads, twin, widths, heads, each, ranks))
            why = f"its forward does not run on some of its heads ({error})"
            if not error and not probe.close(*results):
                return "its forward gives other values, or reads the hidden states beside its projections"
            if not error:
                return ""
    return why


def _by_heads(
    twin: Any, widths: list[int], heads: Iterable[int], angles: tuple[Tensor, ...] | None, ranks: int
) -> tuple[Tensor, Tensor]:
    """What the output projection of ``twin`` is given for each rank's heads, joined; and for all heads at once."""
    forward = with_globals(type(twin).forward, {TABLE: _Table()})
    batch, length = (1, _LENGTH) if angles is None else angles[0].shape[-3:-1]
    projected = [probe.random(batch, length, width) for width in widths]
    given: dict[str, Any] = {} if angles is None else {_ANGLES: tuple(part.float() for part in angles)}
    given |= {_HIDDEN: _nothing(projected[0], batch, length, twin.config.hidden_size), "attention_mask": None}

    def run(parts: Iterable[Tensor]) -> Tensor:
        stand_ins = {name: lambda _, part=part: part for name, part in zip(_PROJECTIONS, parts, strict=True)}
        result = forward(_WithProjections(twin, {**stand_ins, _OUTPUT: lambda heads: heads}), **given)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    by_rank = zip(*(_by_rank(part, number, ranks) for part, number in zip(projected, heads, strict=True)), strict=True)
    return torch.cat([run(parts) for parts in by_rank], -1), run(projected)


def _heads(module: Any) -> tuple[int, int, int]:
    """How many heads queries, keys and values have."""
    config = module.config.get_text_config()
    queries = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    return queries, keys, keys


def _by_rank(projected: Tensor, heads: int, ranks: int) -> Tensor:
    """``[B, s, H * D] -> [n, B, s, h * D]``, of which ranks that share a head get a copy each."""
    by_head = projected.unflatten(-1, (heads, -1))
    by_head = by_head.repeat_interleave(max(ranks // heads, 1), dim=2)
    return by_head.unflatten(2, (ranks, -1)).flatten(3).movedim(2, 0).contiguous()


def _arrived(under_way: Tensor, group: ProcessGroup, _: Tensor) -> Tensor:
    """What the own code gets of a projection: ``[B, S, h * D]``, all positions of this rank's heads."""
    return _Wait.apply(under_way, group).transpose(0, 1).flatten(1, 2)


def _of_all_positions(angles: Any, group: ProcessGroup, whole: WholeSequence | None) -> Any:
    """``cos`` and ``sin`` ``[.., S/n, R]`` of all ranks: gathered once in a forward, and again in recomputed layers."""
    found = {} if whole is None else whole.angles
    if id(angles[0]) not in found:
        found[id(angles[0])] = (angles, tuple(gather_outputs(each, -2, group) for each in angles))
    return found[id(angles[0])][1]


def _nothing(like: Tensor, *shape: int) -> Tensor:
    """NaN of that shape, without memory: code that reads it is seen."""
    return like.new_full((), float("nan")).expand(*shape)


def _launch(parts: Tensor, group: ProcessGroup) -> Tensor:
    """An exchange of equal parts that is under way: the result holds nothing before it is waited for."""
    _, ranks, _ = ranks_of(group)
    sizes = [parts.shape[0] // ranks] * ranks
    launched: Tensor = torch.ops._c10d_functional.all_to_all_single(parts.contiguous(), sizes, sizes, group.group_name)
    return launched


def _waited(under_way: Tensor) -> Tensor:
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(under_way)
    return arrived


class _Start(torch.autograd.Function):
    """Sends parts on their way; backward waits for their gradients, which :class:`_Wait` has sent."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        return _launch(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _waited(gradients[0]), None


class _Wait(torch.autograd.Function):
    """Waits for what is under way; backward sends the gradients on theirs."""

    @staticmethod
    def forward(ctx: Any, under_way: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _waited(under_way).view_as(under_way)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _launch(gradients[0], ctx.group), None


class _WithProjections:
    """Stands for an attention module in its own forward: the module, but for its projections."""

    def __init__(self, module: Any, projections: dict[str, Callable[[Tensor], Any]]) -> None:
        self._module = module
        vars(self).update(projections)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Table:
    """Replaces transformers' table of attention functions."""

    def get_interface(self, *_: Any) -> Callable[..., Any]:
        return _plain_attention

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _plain_attention


def _plain_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    shared = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2), None


def _twin(module: nn.Module) -> Any:
    """A copy on the CPU, of the module's own class, without its projections; its other children with random weights."""
    twin = probe.bare_copy(module)
    for name, child in module._modules.items():
        if name not in (*_PROJECTIONS, _OUTPUT):
            twin._modules[name] = None if child is None else probe.full_copy(child).float()
    for name, parameter in module._parameters.items():
        if parameter is not None:
            twin._parameters[name] = nn.Parameter(probe.random(*parameter.shape))
    for each in twin.modules():
        each.__class__ = eager_class(type(each))
    twin.config = copy.copy(module.config)
    return twin
