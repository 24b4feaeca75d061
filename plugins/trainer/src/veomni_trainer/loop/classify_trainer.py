"""transformers' ``Trainer`` for sequence classifiers, extended as :class:`JobTrainer` extends it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithPadding

from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.method_inputs import MethodInputs
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.trainer import JobTrainer
from veomni_trainer.output.metrics import Row


class ClassifyTrainer(JobTrainer):
    """Learns the labels of texts, and measures how many it gets right."""

    def __init__(self, *args: Any, inputs: MethodInputs, **kwargs: Any) -> None:
        self._method_inputs = inputs
        self._right: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def inputs_of(self, model: nn.Module, corpus: Corpus, train: TrainSection) -> dict[str, Any]:
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

    def _get_num_items_in_batch(self, *args: Any) -> None:
        """Nothing: the loss of a micro-batch is the mean over its texts, and all have as many."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._right.append((outputs.logits.argmax(-1) == inputs["labels"]).float().mean().detach())
        return (loss, outputs) if return_outputs else loss

    def curves(self) -> Row:
        """The share of the texts since the last row whose label had the highest score."""
        right = self._mean(torch.stack(self._right).mean())
        self._right = []
        return {"accuracy": right}
