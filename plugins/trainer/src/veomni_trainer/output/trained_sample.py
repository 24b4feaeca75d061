"""What the trained model computes for a few tokens, kept in each checkpoint: exports are compared with it.

It says too at which tokens the model learned to end; an export goes on with a text that it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

_FILE = "trained.sample"  # safetensors by another suffix: who loads weights takes every *.safetensors for some
_ANSWERED = 32  # tokens of an answer
_SLOW = 2_000_000_000  # parameters with which a CPU would take minutes for one
_TOKENS, _POSITIONS = 128, 16
_MEDIA = "media."  # before the names of what the model takes beside tokens
_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE = 0.1  # of 16 bits: their rounding adds up over layers, and may send a token to another expert


@dataclass(frozen=True)
class Sample:
    """A few tokens, and what the trained model computed for them.

    Attributes:
        ids: ``[tokens]``, the first ones that were trained on.
        logits: ``[positions, vocabulary]``, float32, at evenly spaced positions; ``None`` where they could not be had.
        why_not: why not.
        autocast: the dtype of ``torch.autocast`` in training.
        ends: how many documents were learned to end with which token; ``-1``: with none of its own.
        is_new: whether training began with random weights, so that nothing but the job says where the model ends.
        media: what the model takes beside ``ids``, of a row with images, video or audio.
    """

    ids: Tensor
    logits: Tensor | None = None
    why_not: str = ""
    autocast: str | None = None
    ends: Mapping[int, int] = field(default_factory=dict)
    is_new: bool = False
    media: Mapping[str, Tensor] = field(default_factory=dict)

    def difference(self, logits: Tensor) -> float:
        """How far ``logits`` ``[positions, vocabulary]`` are from the trained model's, as a part of their size."""
        assert self.logits is not None
        if logits.shape != self.logits.shape:
            return float("inf")
        alone = self.logits.shape[-1] == 1  # one score, which a mean would leave nothing of
        spread = (self.logits if alone else self.logits - self.logits.mean(-1, keepdim=True)).norm()
        return float((logits - self.logits).norm() / spread.clamp_min(1e-30))

    def tolerance(self, dtype: torch.dtype) -> float:
        """The largest difference that is rounding, of an exported model whose weights are in ``dtype``."""
        return _COARSE if self.autocast else _TOLERANCES.get(dtype, _COARSE)


def write_sample(folder: Path, sample: Sample) -> None:
    """Put ``sample`` into a checkpoint."""
    facts = {name: getattr(sample, name) for name in ("why_not", "autocast", "ends", "is_new")}
    tensors = {"ids": sample.ids} | ({} if sample.logits is None else {"logits": sample.logits})
    tensors |= {f"{_MEDIA}{name}": value.contiguous() for name, value in sample.media.items()}
    save_file(tensors, folder / _FILE, {"facts": json.dumps(facts)})


def read_sample(checkpoint: Path) -> Sample | None:
    """The sample of ``checkpoint``; ``None`` if it has none, as those of earlier versions."""
    try:
        with safe_open(checkpoint / _FILE, "pt") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            logits = file.get_tensor("logits") if "logits" in file.keys() else None  # noqa: SIM118
            facts["ends"] = {int(token): count for token, count in facts["ends"].items()}
            names = [name for name in file.keys() if name.startswith(_MEDIA)]  # noqa: SIM118
            media = {name.removeprefix(_MEDIA): file.get_tensor(name) for name in names}
            return Sample(file.get_tensor("ids"), logits, **facts, media=media)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None


def sample_ids(ids: Tensor, multiple: int = 1) -> Tensor:
    """The part of a sequence that is computed; its length is a multiple of the ranks that share a sequence."""
    return ids[: min(len(ids), _TOKENS) // multiple * multiple].cpu().long()


def logits_of(model: Any, sample: Sample, autocast: str | None = None) -> Tensor:
    """``[positions, vocabulary]``: the model's logits for the sample's tokens, in float32 on the CPU.

    All ranks of a sharded model call this together. One that computes a part of the sequence has its part's logits.
    """
    was_training, device = model.training, next(model.parameters()).device
    accelerators = [] if device.type == "cpu" else [device]  # fork_rng always keeps the CPU's random state
    dtype = getattr(torch, autocast) if autocast else None
    inputs = {"input_ids": sample.ids[None], **sample.media}
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda"),
            torch.autocast(device.type, dtype) if dtype else nullcontext(),
        ):
            found = model(**{name: value.to(device) for name, value in inputs.items()}).logits
            logits = found.full_tensor() if isinstance(found, DTensor) else found
            if logits.ndim == 2:  # the scores of a whole sequence
                logits = logits[:, None]
            rows = logits[0, torch.linspace(0, logits.shape[1] - 1, min(_POSITIONS, logits.shape[1])).long()]
            return rows.float().cpu().contiguous()
    finally:
        model.train(was_training)


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
                max_new_tokens=_ANSWERED,
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
