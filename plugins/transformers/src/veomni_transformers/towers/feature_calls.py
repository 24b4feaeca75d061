"""Where a model calls its towers: the methods by which transformers' models turn pixels and sound into features."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from veomni_core.sites.walk import named_modules
from veomni_transformers.proving.functions import code_layers, current_forward
from veomni_transformers.towers.parts import towers

_METHOD = re.compile(r"get_(image|video|audio)_features$")
_ARGUMENTS = {
    **{"pixel_values": "image", "pixel_values_videos": "video"},
    **{"input_features": "audio", "input_values": "audio"},
}
_EMBEDDINGS = "get_input_embeddings"
_FIELDS = ("pooler_output", "last_hidden_state")  # of a method's output: its caller reads one of them
UNREAD = {*_FIELDS, "hidden_states", "attentions"}


@dataclass(frozen=True)
class FeatureCall:
    """One method that a model's forward calls where it is given an input of a kind.

    Attributes:
        method: its name, ``get_image_features``; ``forward`` where the model calls none.
        modality: ``image``, ``video`` or ``audio``.
        argument: the argument of forward, and of the method, that holds the input: ``pixel_values``.
        field: the field of the method's output that forward reads: ``pooler_output``.
        why_not: why the method is not all that runs for such an input; empty if it is.
    """

    method: str
    modality: str
    argument: str
    field: str
    why_not: str = ""


def feature_calls(model: nn.Module) -> Iterator[tuple[str, tuple[FeatureCall, ...]]]:
    """The modules of ``model`` whose forward calls such methods, each with its calls in the order of the code.

    By an argument of forward that has the name of the method's first one, a step says whether there is such an input.
    A model that runs its towers in another way is given with what its forward takes, and why that is no such call.

    Example:
        >>> import torch
        >>> from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
        >>> with torch.device("meta"):
        ...     model = Qwen3VLForConditionalGeneration(Qwen3VLConfig())
        >>> [(path, [call.argument for call in calls]) for path, calls in feature_calls(model)]
        [('model', ['pixel_values', 'pixel_values_videos'])]
    """
    found, modules = False, named_modules(model)
    for path, module in modules:
        if isinstance(module, PreTrainedModel) and (calls := _calls_of(module)):
            found = True
            yield path, calls
    config = getattr(model, "config", None)
    if not found and isinstance(config, PretrainedConfig) and not config.is_encoder_decoder:
        # The innermost one: other code than its own may stand in the place of a head's forward, as TRL's losses do.
        for path, module in reversed(modules):
            if calls := _own_calls_of(module):
                yield path, calls
                return


def _own_calls_of(module: nn.Module) -> tuple[FeatureCall, ...]:
    parameters = inspect.signature(current_forward(module)).parameters if isinstance(module, PreTrainedModel) else {}
    taken = {name: kind for name, kind in _ARGUMENTS.items() if name in parameters}
    if not taken or "input_ids" not in parameters or not towers(module):
        return ()
    why_not = "its forward runs towers itself, and not by such methods"
    return tuple(FeatureCall("forward", kind, name, "", why_not) for name, kind in taken.items())


def _calls_of(module: PreTrainedModel) -> tuple[FeatureCall, ...]:
    forward = current_forward(module)
    layers = [*code_layers(forward)]
    named = {name for layer in layers for name in layer.__code__.co_names}
    if _EMBEDDINGS not in named or not any(map(_METHOD.match, named)):  # known without the order, an eighth of a bind
        return ()
    names = [str(each.argval) for layer in layers for each in dis.get_instructions(layer)]
    parameters = inspect.signature(forward).parameters
    calls = []
    for name in dict.fromkeys(names):
        if (found := _METHOD.match(name)) and (method := getattr(type(module), name, None)):
            argument = [*inspect.signature(method).parameters][1]
            if argument in parameters:
                after = names[names.index(name) :]
                field = next((each for each in after if each in _FIELDS), _FIELDS[0])
                calls.append(FeatureCall(name, found[1], argument, field))
    parts = {path.partition(".")[0] for paths in towers(module).values() for path in paths} if calls else set()
    if outside := [name for name in dict.fromkeys(names) if name in parts]:
        calls = [replace(call, why_not=f"its forward runs {outside[0]} besides") for call in calls]
    return tuple(calls) if parts else ()


def read_tensors(output: Any, field: str) -> list[Tensor]:
    """The tensors of such a method's output that its caller reads, who reads ``field`` of those with fields."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, ModelOutput):
        output = [value for name, value in output.items() if name == field or name not in UNREAD]
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
