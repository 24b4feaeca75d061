"""What the trained model computes for a few tokens, kept in each checkpoint: exports are compared with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor

_FILE = "trained.sample"  # safetensors by another suffix: who loads weights takes every *.safetensors for some
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

    def to_bytes(self) -> bytes:
        """The content of the file that :func:`read_sample` reads."""
        facts = {
            "why_not": self.why_not,
            "autocast": self.autocast,
            "ends": {str(token): count for token, count in self.ends.items()},
            "is_new": self.is_new,
        }
        tensors = {"ids": self.ids} | ({} if self.logits is None else {"logits": self.logits})
        tensors |= {f"{_MEDIA}{name}": value.contiguous() for name, value in self.media.items()}
        return save(tensors, {"facts": json.dumps(facts)})

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
    (folder / _FILE).write_bytes(sample.to_bytes())


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
    dtype = getattr(torch, autocast) if autocast else None
    inputs = {"input_ids": sample.ids[None], **sample.media}
    model.eval()
    try:
        with (
            torch.no_grad(),
            _random_states_kept(device),
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


def _random_states_kept(device: torch.device) -> Any:
    kind = "cuda" if device.type == "cpu" else device.type  # fork_rng always keeps the CPU's
    return torch.random.fork_rng(devices=() if device.type == "cpu" else (device,), device_type=kind)
