"""transformers' ``Trainer`` for sequence classifiers, extended as :class:`JobTrainer` extends it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithPadding

from veomni_trainer.data.corpus import Corpus
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.trainer import JobTrainer
from veomni_trainer.output.metrics import Row


class ClassifyTrainer(JobTrainer):
    """Learns the labels of texts, and measures how many it gets right."""

    counts_labels = False  # the loss of a micro-batch is the mean over its texts, and all have as many

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._right: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def inputs_of(self, model: nn.Module, corpus: Corpus, train: TrainSection) -> dict[str, Any]:
        assert self._method_inputs is not None
        tokenizer, longest = self._method_inputs.tokenizer, self._method_inputs.longest
        text, label = train.columns
        config: Any = model.config
        rows: Any = corpus.training

        def read(row: dict[str, Any]) -> dict[str, Any]:
            ids = tokenizer(row[text], truncation=True, max_length=longest)["input_ids"]
            return {"input_ids": ids, "labels": config.label2id[row[label]]}

        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return {
            "train_dataset": rows.map(read, remove_columns=rows.column_names),
            "data_collator": DataCollatorWithPadding(tokenizer),
        }

    def look_at(self, outputs: Any, inputs: dict[str, Any]) -> None:
        self._right.append((outputs.logits.argmax(-1) == inputs["labels"]).float().mean().detach())

    def curves(self) -> Row:
        """The share of the texts since the last row whose label had the highest score."""
        right = self._mean(torch.stack(self._right).mean())
        self._right = []
        return {"accuracy": right}
