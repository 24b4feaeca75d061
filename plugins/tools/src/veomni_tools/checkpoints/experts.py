"""The experts of a model, and the names under which transformers publishes them.

A layout says how a checkpoint stores them; E experts, H hidden, I intermediate:

- ``per_expert``: a matrix for each expert and projection, ``[I, H]`` and ``[H, I]``, as of ``nn.Linear``;
- ``fused``: all experts' in one tensor, ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``;
- ``fused_transposed``: ``gate_up_proj [E, H, 2I]`` and ``down_proj [E, I, H]``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from veomni_transformers.stored_layouts import decided_by_shape

_FIRST = ("gate_up_proj", "up_proj")
_GENERIC = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
_ONE = re.compile(r"(.+)\.(-?\d{1,4000})\.(\w+\.(?:weight|bias))")


class Layout(StrEnum):
    """How a checkpoint stores experts."""

    PER_EXPERT = "per_expert"
    FUSED = "fused"
    FUSED_TRANSPOSED = "fused_transposed"


@dataclass(frozen=True)
class ExpertParameter:
    """One parameter that holds a projection of all experts, or its biases.

    Attributes:
        name: its name in the model.
        shape: ``[E, rows, columns]`` as the model has it; of biases ``[E, rows]``.
        transposed: whether the model has it transposed, so that the rows are inputs.
        interleaved: whether rows of gate and up take turns.
        leaves: the ends of the names of one expert's tensors: of gate and up, or of the one projection.
        published: whether transformers publishes this model's experts one by one, under these names.
        either_way: whether transformers transposes it on loading where its shape is not the model's.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    interleaved: bool
    leaves: tuple[str, ...]
    published: bool
    either_way: bool

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The path of the experts."""
        return self.name.rpartition(".")[0]

    @property
    def own_layout(self) -> Layout:
        """How the model itself has it."""
        return Layout.FUSED_TRANSPOSED if self.transposed else Layout.FUSED

    @property
    def is_square(self) -> bool:
        """Whether its shape doesn't say if it is transposed."""
        return len(self.shape) == 3 and self.shape[1] == self.shape[2]

    def stored_shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape of the tensor of all experts, or with ``per_expert`` of each tensor of one of them."""
        if len(self.shape) == 2:
            return (self.shape[1] // len(self.leaves),) if layout is Layout.PER_EXPERT else self.shape
        rows, columns = self.shape[1:][:: -1 if self.transposed else 1]
        if layout is Layout.PER_EXPERT:
            return rows // len(self.leaves), columns
        return (self.shape[0], rows, columns) if layout is Layout.FUSED else (self.shape[0], columns, rows)

    def is_read_in(self, layout: Layout) -> bool:
        """Whether ``from_pretrained`` reads it from this layout, and reads it right."""
        if layout is Layout.PER_EXPERT:
            return self.published
        return len(self.shape) == 2 or layout is self.own_layout or (self.either_way and not self.is_square)


def expert_parameters(model: Any) -> dict[str, ExpertParameter]:
    """The parameters of ``model`` that hold all experts of a layer, by their names; it may be on the meta device."""
    either = [re.compile(pattern) for pattern in decided_by_shape(model)]
    found = {}
    for path, module in model.named_modules():
        own = {name: tuple(each.shape) for name, each in module._parameters.items() if each is not None}
        first = next((name for name in _FIRST if len(own.get(name, ())) == 3), None)
        if first is None or len(own.get("down_proj", ())) != 3:
            continue
        turned = _is_transposed(module, own[first], own["down_proj"])
        for leaf in (first, "down_proj", f"{first}_bias", "down_proj_bias"):
            if leaf in own:
                name = f"{path}.{leaf}" if path else leaf
                halves = leaf.removesuffix("_bias") == "gate_up_proj"
                published = _published_leaves(model, name, own[leaf], halves)
                end = "bias" if leaf.endswith("_bias") else "weight"
                generic = tuple(f"{each}.{end}" for each in _GENERIC[leaf.removesuffix("_bias")])
                takes_turns = halves and _is_interleaved(module, own[first][2 if turned else 1])
                either_way = any(pattern.search(name) for pattern in either)
                parameter = (turned, takes_turns, published or generic, bool(published), either_way)
                found[name] = ExpertParameter(name, own[leaf], *parameter)
    return found


def one_expert(name: str) -> tuple[str, int, str] | None:
    """The experts' path, the number and the end of the name of one expert's tensor.

    Example:
        >>> one_expert("model.layers.0.mlp.experts.7.gate_proj.weight")
        ('model.layers.0.mlp.experts', 7, 'gate_proj.weight')
    """
    match = _ONE.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def _is_transposed(module: Any, first: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """By the shapes, which differ where gate and up are in one tensor; else as transformers' decorator has it."""
    if first[1:] == (2 * down[2], down[1]):
        return False
    if first[1:] == (down[2], 2 * down[1]):
        return True
    return bool(getattr(module, "is_transposed", False))


def _is_interleaved(module: Any, rows: int) -> bool:
    """Whether the module's gate reads the columns 0 and 1 of ``[.., 2I]`` for its first output, and not 0 and I.

    A change of column 1 then changes that output. Modules without a gate of their own chunk the columns.
    """
    gate = getattr(module, "_apply_gate", None)
    if gate is None or rows < 4:
        return not getattr(module, "is_concatenated", True)
    values = torch.full((2, rows), 0.5)
    values[1, 1] = 0.25
    try:
        with torch.no_grad():
            first, second = gate(values)[:, 0]
    except Exception:  # a gate of another form, which transformers' flag describes
        return not getattr(module, "is_concatenated", True)
    return bool(first != second)


def _published_leaves(model: Any, name: str, shape: tuple[int, ...], halves: bool) -> tuple[str, ...]:
    """The ends of the names under which ``save_pretrained`` writes one expert's tensors; empty if it writes none such.

    transformers' own conversion is run on values that say where they are from.
    """
    count = 2 if halves else 1
    values = torch.arange(shape[0] * count, dtype=torch.float64).view(shape[0], count, 1)
    try:
        written = revert_weight_conversion(model, {name: values})
    except Exception:  # a conversion for other shapes: it does not just stack experts
        return ()
    leaves: dict[int, str] = {}
    for stored, tensor in written.items():
        one = one_expert(stored)
        if one is None or tensor.numel() != 1 or int(tensor) // count != one[1]:
            return ()
        leaves.setdefault(int(tensor) % count, one[2])
    return tuple(leaves[half] for half in range(count)) if len(leaves) == count else ()
