"""Importing the bridges, and using them, leaves transformers, TRL and accelerate as they were."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from library_names import differences, names_of
from tiny_training import AUTO, llama, trainer
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer import DEFAULT_CALLBACKS
from trl import SFTConfig, SFTTrainer
from trl_data import QUICK, TEXTS, make_tokenizer

from veomni_core import binding_of

LIBRARIES = ("accelerate", "peft", "transformers", "trl")
BRIDGES = ("veomni_bridges.transformers", "veomni_bridges.trl", "veomni_bridges.use_kernels")


def of_libraries() -> Iterator[tuple[str, Any]]:
    """The names of the libraries, and what their registries hold."""
    yield from names_of(*LIBRARIES)
    yield "attention", dict(ALL_ATTENTION_FUNCTIONS.items())
    yield "masks", dict(ALL_MASK_ATTENTION_FUNCTIONS.items())
    yield "losses", dict(LOSS_MAPPING)
    yield "callbacks", list(DEFAULT_CALLBACKS)


def use(folder: Any) -> None:
    """Train by both bridges; the first model is given back, the second one stays bound."""
    by_transformers, by_trl = (importlib.import_module(name).VeOmniCallback for name in BRIDGES[:2])
    trainer(llama(), folder, by_transformers(**AUTO, undo=True)).train()
    args = SFTConfig(output_dir=str(folder), **QUICK)
    model = llama()
    SFTTrainer(model, args, train_dataset=TEXTS, processing_class=make_tokenizer(), callbacks=[by_trl(**AUTO)]).train()
    assert binding_of(model).active


def test_the_libraries_are_as_they_were(tmp_path, monkeypatch):
    use(tmp_path)  # what the libraries import and cache on first use has been imported and cached
    for name in [name for name in sys.modules if name.partition(".")[0] == "veomni_bridges"]:
        monkeypatch.delitem(sys.modules, name)
    before = dict(of_libraries())
    for name in BRIDGES:
        importlib.import_module(name)
    assert differences(before, dict(of_libraries())) == []
    use(tmp_path)
    assert differences(before, dict(of_libraries())) == []


def test_the_comparison_sees_a_patched_class(monkeypatch):
    before = dict(of_libraries())
    monkeypatch.setattr(SFTTrainer, "compute_loss", lambda *_: None)
    assert differences(before, dict(of_libraries())) == [
        "trl.trainer.sft_trainer.SFTTrainer.compute_loss",
    ]
