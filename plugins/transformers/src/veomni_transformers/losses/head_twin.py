"""A probe model: a model's own head and loss over a placeholder for its decoder.

It has a tiny vocabulary, and none of the model's weights.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from veomni_transformers.proving import probe

VOCABULARY = 11
# Layers between decoder and output projection run at their real width (BERT's have 0.6 million numbers). A larger
# module gets a placeholder, and a larger tensor is refused.
_MOST_NUMBERS = 16_000_000


def head_twin(model: Any, head: nn.Linear, hidden: Tensor) -> tuple[nn.Module, nn.Linear]:
    """The probe model, whose decoder returns ``hidden`` whatever it is called with, and its output projection.

    Raises:
        LookupError: the model has no part that could be its decoder, or too large a part besides it.
    """
    sizes = {head.out_features: VOCABULARY}
    tiny_head = probe.tiny_linear(head.in_features, VOCABULARY, head.bias is not None)
    decoder, others = _decoder(model, head)
    # So large a module must be a tower of its own, which a step on text alone does not run.
    large = [child for child in others if child is decoder or _numbers(child) > _MOST_NUMBERS]
    stand_ins = {id(child): _StandIn(child, hidden) for child in large}
    twin: Any = _copied(model, {id(head): tiny_head, **stand_ins}, sizes)
    for part in (part for part in twin.modules() if isinstance(part, PreTrainedModel)):
        part.config = copy.deepcopy(part.config)
        for config in (part.config, part.config.get_text_config()):
            config.vocab_size = VOCABULARY
            config.output_router_logits = False
    return twin.train(), tiny_head


def decoder_width(model: Any, head: nn.Linear) -> int:
    """The width of the decoder's hidden states, which is not always the width of the head's input.

    ELECTRA and RemBERT project to another width before the vocabulary, which their configs name.
    """
    config = model.config.get_text_config()
    for name in ("embedding_size", "output_embedding_size"):
        if getattr(config, name, None) == head.in_features:
            return config.hidden_size
    return head.in_features


def _decoder(model: Any, head: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The module that turns tokens into hidden states, and all child modules that don't hold the output projection.

    Of several candidates the decoder is the one that the class's ``base_model_prefix`` names, else the largest. If the
    projection lies in an inner model, or in the only child, the search goes on there.
    """
    children = list(model.children())
    others = [child for child in children if not any(module is head for module in child.modules())]
    holder = next((child for child in children if all(child is not other for other in others)), None)
    if holder is not None and holder is not head and (isinstance(holder, PreTrainedModel) or not others):
        decoder, within = _decoder(holder, head)
        return decoder, [*others, *within]
    if not others:
        raise LookupError("it has no child besides its output projection")
    named = getattr(model, getattr(model, "base_model_prefix", ""), None)
    if isinstance(named, nn.Module) and any(child is named for child in others):
        return named, others
    return max(others, key=_numbers), others


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _copied(module: nn.Module, replaced: dict[int, nn.Module], sizes: dict[int, int]) -> nn.Module:
    """A copy of ``module`` with some children ``replaced``, and random numbers in the tensors of all others."""
    twin = probe.bare_copy(module)
    for tensors, source in ((twin._parameters, module._parameters), (twin._buffers, module._buffers)):
        for name, value in source.items():
            tensors[name] = None if value is None else _random_like(value, sizes)  # type: ignore[index,assignment]
    for name, child in module._modules.items():
        if child is not None:
            child = replaced[id(child)] if id(child) in replaced else _copied(child, replaced, sizes)
        twin._modules[name] = child
    probe.resize_attributes(twin, sizes)
    return twin


def _random_like(tensor: Tensor, sizes: dict[int, int]) -> Tensor:
    shape = [sizes.get(size, size) for size in tensor.shape]
    if (numbers := math.prod(shape)) > _MOST_NUMBERS:
        raise LookupError(f"a tensor of {numbers / 1e6:.0f} million numbers lies between its decoder and its loss")
    return probe.random(*shape, scale=max(shape[-1:] or [1]) ** -0.5)


@dataclass
class _Output(MoeModelOutputWithPast):
    """The output of any decoder: every attribute that was not set is ``None``."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _StandIn(nn.Module):
    """Returns fixed hidden states, whatever it is called with; its other attributes are the real module's."""

    def __init__(self, real: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        vars(self).update(_real=real, _hidden=hidden)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(last_hidden_state=self._hidden)

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["_real"], name)
        return _StandIn(value, vars(self)["_hidden"]) if isinstance(value, nn.Module) else value
