"""Prints the losses of a model that was built with ``use_kernels=True``, and how often its kernel ran.

A program of its own, since transformers decides when it is imported whether it takes the installed ``kernels``. Usage:
``python hub_layer_run.py FILE`` with a file of Python that defines ``model``.
"""

from __future__ import annotations

import inspect
import json
import runpy
import sys

import torch
import transformers.utils.import_utils as import_utils

# transformers asks for a newer `kernels` than may be installed; this one has what it imports of it.
is_accepted = inspect.unwrap(import_utils.is_kernels_available)
is_accepted.__defaults__ = ("0.17", *(is_accepted.__defaults__ or ())[1:])
import_utils.is_kernels_available.cache_clear()

from kernels import Mode  # noqa: E402
from transformers.integrations import hub_kernels  # noqa: E402

from migrations import losses  # noqa: E402

calls = 0


class CountedNorm(torch.nn.Module):
    """A layer as the Hub has them: its forward runs on the module that it replaces."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        global calls
        calls += 1
        shape = hidden_states.shape[-1:]
        return torch.nn.functional.rms_norm(hidden_states, shape, self.weight, self.variance_epsilon)


class Repository:
    """A place of a layer, as transformers' table names them."""

    def load(self) -> type[torch.nn.Module]:
        return CountedNorm


hub_kernels._KERNEL_MAPPING_CACHE = {"RMSNorm": {"cpu": dict.fromkeys((Mode.TRAINING, Mode.INFERENCE), Repository())}}
model = runpy.run_path(sys.argv[1])["model"]
found = losses(model)
try:
    from veomni_core import bind

    bind(model, {"preset": "eager"})
    refusal = ""
except Exception as error:
    refusal = str(error)
print(json.dumps({"losses": found, "calls": calls, "refusal": refusal}))
