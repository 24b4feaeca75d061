"""Where a model calls its towers: the methods by which transformers' models turn pixels and sound into features."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from veomni_transformers.proving.functions import code_layers, current_forward

_METHOD = re.compile(r"get_(image|video|audio)_features$")
_EMBEDDINGS = "get_input_embeddings"
_FIELDS = ("pooler_output", "last_hidden_state")  # of a method's output: its caller reads one of them
_UNREAD = {*_FIELDS, "hidden_states", "attentions"}


@dataclass(frozen=True)
class FeatureCall:
    """One method that a model's forward calls where it is given an input of a kind.

    Attributes:
        method: its name, ``get_image_features``.
        modality: ``image``, ``video`` or ``audio``.
        argument: the argument of forward, and of the method, that holds the input: ``pixel_values``.
        field: the field of the method's output that forward reads: ``pooler_output``.
    """

    method: str
    modality: str
    argument: str
    field: str


def feature_calls(model: nn.Module) -> Iterator[tuple[str, tuple[FeatureCall, ...]]]:
    """The modules of ``model`` whose forward calls such methods, each with its calls in the order of the code.

    A call is left out unless forward has an argument of the name of the method's first one, by which a step says
    whether there is such an input. So is a module whose forward doesn't embed words by ``get_input_embeddings``.

    Example:
        >>> import torch
        >>> from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
        >>> with torch.device("meta"):
        ...     model = Qwen3VLForConditionalGeneration(Qwen3VLConfig())
        >>> [(path, [call.argument for call in calls]) for path, calls in feature_calls(model)]
        [('model', ['pixel_values', 'pixel_values_videos'])]
    """
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and (calls := _calls_of(module)):
            yield path, calls


def _calls_of(module: PreTrainedModel) -> tuple[FeatureCall, ...]:
    forward = current_forward(module)
    names = [str(each.argval) for code in code_layers(forward) for each in dis.get_instructions(code)]
    if _EMBEDDINGS not in names:
        return ()
    parameters = inspect.signature(forward).parameters
    calls = []
    for name in dict.fromkeys(names):
        if (found := _METHOD.match(name)) and (method := getattr(type(module), name, None)):
            argument = [*inspect.signature(method).parameters][1]
            if argument in parameters:
                after = names[names.index(name) :]
                field = next((each for each in after if each in _FIELDS), _FIELDS[0])
                calls.append(FeatureCall(name, found[1], argument, field))
    return tuple(calls)


def read_tensors(output: Any, field: str) -> list[Tensor]:
    """The tensors of such a method's output that its caller reads, who reads ``field`` of those with fields."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, ModelOutput):
        output = [value for name, value in output.items() if name == field or name not in _UNREAD]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in read_tensors(value, field)]
    return []


def with_added(output: Any, field: str, zero: Tensor) -> Any:
    """``output`` with ``zero`` added to the first tensor that :func:`read_tensors` finds in it."""
    if isinstance(output, Tensor):
        return output + zero.to(output.dtype)
    if isinstance(output, ModelOutput):
        output[field] = with_added(output[field], field, zero)
        return output
    first = next(number for number, value in enumerate(output) if read_tensors(value, field))
    changed = [with_added(each, field, zero) if number == first else each for number, each in enumerate(output)]
    return type(output)(changed)
