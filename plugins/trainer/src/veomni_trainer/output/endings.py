"""At which tokens a trained model ends, and whether it does: an export goes on with a text that it was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from veomni_trainer.output.trained_sample import Sample

_MOST = 32  # tokens of the answer
_SLOW = 2_000_000_000  # parameters with which a CPU would take minutes for it


def learned_ends(sample: Sample | None) -> tuple[list[int], float]:
    """The tokens that documents were learned to end with, the most frequent first, and the share that has none.

    A token at the end of less than a hundredth of the documents is none of them.
    """
    counts = dict(sample.ends) if sample else {}
    total, without = sum(counts.values()), counts.pop(-1, 0)
    learned = sorted((token for token in counts if counts[token] >= total / 100), key=lambda token: -counts[token])
    return learned, without / max(total, 1)


def all_ends(learned: Iterable[int], *known: Any) -> list[int]:
    """``learned``, and what configs say as ``eos_token_id``: a number, a list of them, or nothing."""
    ends = [*learned]
    for each in known:
        ends += each if isinstance(each, list) else [each] if isinstance(each, int) else []
    return [*dict.fromkeys(ends)]


def end_tokens(model: Any, sample: Sample | None) -> list[int]:
    """The tokens at which ``model`` ends: those that it learned, and those of its configs unless it is new."""
    learned, _ = learned_ends(sample)
    if sample and sample.is_new and learned:
        return learned
    return all_ends(learned, model.generation_config.eos_token_id, model.config.get_text_config().eos_token_id)


def asked(model: Any, sample: Sample) -> str:
    """How ``model`` goes on with the first half of the sample, as a sentence that begins with a semicolon."""
    size = sum(parameter.numel() for parameter in model.parameters())
    device = next(model.parameters()).device
    if not getattr(model, "can_generate", lambda: False)() or len(sample.ids) < 2 or sample.media:
        return ""  # half of a text with pictures may be half of a picture
    if device.type == "cpu" and size > _SLOW:
        return "; it was not asked for an answer, which would take a CPU minutes"
    prompt, ends = sample.ids[None, : len(sample.ids) // 2].to(device), end_tokens(model, sample)
    try:
        with torch.inference_mode():
            found = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=_MOST,
                do_sample=False,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
            )
    except Exception as error:  # of code that comes with a model; its logits are those that were trained
        return f"; it could not be asked for an answer ({type(error).__name__}: {error})"
    new = found[0, prompt.shape[1] :].tolist()
    if new and new[-1] in ends:
        return f"; it ended its answer to a text of the training after {len(new)} tokens"
    return f"; it had not ended its answer to a text of the training after {len(new)} tokens"
