"""Processes that make batches while the device computes, and what the training process hears of their errors."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from veomni_core.errors import VeOmniError
from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.streaming import Stream

_OF_MEDIA = 2  # two pictures of 1024x1024 take one process 60 to 80 ms to decode and to cut into patches


def loader_processes(wanted: int | None, corpus: Corpus, device: torch.device) -> int:
    """How many processes make batches; with 0 the training process does, before each step.

    Args:
        wanted: ``data.workers``. Without it media have two where an accelerator computes meanwhile, and all else none.
        corpus: what is trained on.
        device: trains the model.
    """
    if wanted is not None:
        return wanted
    # Another way to start processes would pickle the model's processor and the code of its towers.
    forks = multiprocessing.get_start_method() == "fork"
    has_media = corpus.processor is not None and not isinstance(corpus.training, Stream)
    return _OF_MEDIA if has_media and forks and device.type != "cpu" else 0


@contextmanager
def errors_of_processes() -> Iterator[None]:
    """Raise errors of a loader's process as they were raised there: torch puts the trace into their message."""
    try:
        yield
    except VeOmniError as error:
        kind = type(error)
        _, mark, message = str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
        if not mark:
            raise
        raise kind(message.rstrip()) from error
