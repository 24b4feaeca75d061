"""Whether a model's loss divides by ``num_items_in_batch``, decided by value."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from veomni_transformers.losses.head_twin import VOCABULARY, decoder_width, head_twin
from veomni_transformers.losses.language_models import language_models
from veomni_transformers.proving import probe

_ITEMS = 3  # of which the small batch has more


def divides_by_items(model: PreTrainedModel) -> bool | None:
    """Run the model's own loss over a placeholder for its decoder, with ``num_items_in_batch`` and without it.

    The attribute ``accepts_loss_kwargs`` of transformers' classes and the parameters of a forward don't decide it: the
    losses of Qwen3-VL and Qwen3.5 divide by the number although they say False, and Whisper's takes none.

    Args:
        model: unbound; it may be on the meta device.

    Returns:
        Whether the loss is the sum over labels divided by that number; ``None`` where the loss can't be run so.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        >>> divides_by_items(LlamaForCausalLM(small))
        True
    """
    found = next((each for each in language_models(model) if not each.path), None)
    if found is None:
        return None
    divides, why_not = probe.attempt(lambda: _divides(model, found.head))
    return None if why_not else divides


def _divides(model: Any, head: Any) -> bool:
    with probe.seeded():
        twin, _ = head_twin(model, head, probe.random(2, 5, decoder_width(model, head)))
        labels = torch.randint(VOCABULARY, (2, 5), generator=probe.generator())
        given = {"input_ids": labels, "labels": labels}
        with probe.own_numbers(), torch.no_grad():
            mean: Any = twin.forward(**given)
            counted, why_not = probe.attempt(lambda: twin.forward(**given, num_items_in_batch=torch.tensor(_ITEMS)))
        if why_not:  # it takes no such argument
            return False
        learned = labels[:, 1:].numel()
        return probe.close(counted.loss * _ITEMS, mean.loss * learned)
