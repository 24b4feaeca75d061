"""How much of a GPU's arithmetic a step uses, counted as ``veomni train`` counts it."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM

from benchmarks.whole_models.contenders import MODELS
from veomni_trainer.loop.measures import PEAKS, Throughput


def mfu(model: str, batch: str, milliseconds: float, gpu: str) -> float | None:
    """The share of the GPU's peak that a step of ``model`` reaches; ``None`` for towers, which the formula leaves out.

    Args:
        model: one of ``MODELS``.
        batch: sequences and their length, as ``4x4096``.
        milliseconds: the time of forward and backward.
        gpu: its name, as PyTorch gives it.
    """
    tera = _tera_operations(model, batch)
    return None if tera is None or gpu not in PEAKS else tera / (milliseconds / 1000) / PEAKS[gpu]


@cache
def _tera_operations(model: str, batch: str) -> float | None:
    config = MODELS[model]()
    if config is not config.get_text_config():
        return None
    sequences, length = map(int, batch.split("x"))
    with torch.device("meta"):
        counted = Throughput(AutoModelForCausalLM.from_config(config), peak=1.0, processes=1, packs=False)
    counted.count(sequences * length, length)
    return counted.read(seconds=1.0)["tflops"]
