"""TRL's trainers, extended as :class:`~veomni_trainer.loop.trainer.JobTrainer` extends transformers'. Imports TRL."""

from __future__ import annotations

import math
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import nn

from veomni_core.errors import JobFileError
from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.method_inputs import MethodInputs
from veomni_trainer.job.method_packages import orpo, require_trl
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.corrected_trainer import CorrectedTrainer
from veomni_trainer.loop.trainer import JobTrainer
from veomni_trainer.output.metrics import Row
from veomni_transformers.rollout_replay import RolloutReplay

require_trl(__name__)

import trl  # noqa: E402
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model  # noqa: E402

from veomni_trainer.loop.rollout_parity import SCORES, RolloutParity, at_positions_of_generation  # noqa: E402

# What TRL counts beside its curves; a row has its own figures of these.
_OWN = ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time", "total_flos")


class MethodTrainer(JobTrainer):
    """A :class:`JobTrainer` whose loss is that of one of TRL's trainers, which comes after it among the bases."""

    counts_labels = False
    _method_inputs: MethodInputs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "ref" in getattr(self.model, "peft_config", {}):
            # TRL's copy of the adapter as it is now, which is trained already where a run goes on. Without it the
            # reference is the model without an adapter.
            self.model.delete_adapter("ref")  # type: ignore[union-attr,operator]

    def inputs_of(self, model: nn.Module, corpus: Corpus, train: TrainSection) -> dict[str, Any]:
        processing: Any = self._method_inputs.tokenizer
        if corpus.processor is not None:
            processing = copy(corpus.processor.loaded)
            processing.tokenizer = self._method_inputs.tokenizer
        return {"processing_class": processing, "train_dataset": corpus.training}

    def count_tokens(self, inputs: dict[str, Any]) -> None:
        """Nothing yet: TRL may still have completions drawn. Its loss is computed of all tokens."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """TRL's loss. A row of metrics counts its tokens."""
        if model.training:
            names = ("input_ids", "prompt_ids", "completion_ids", "chosen_input_ids", "rejected_input_ids")
            shapes = [inputs[name].shape for name in names if name in inputs]
            self._count(sum(shape.numel() for shape in shapes) * self.args.world_size, shapes[0][-1])
        # Past JobTrainer's own, which asks for the model's outputs.
        loss: Any = super(JobTrainer, self).compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return (loss, {}) if return_outputs else loss

    def curves(self) -> Row:
        """What TRL has measured since the last row, as averages."""
        measured = self.measured()
        row = {key: sum(values) / len(values) for key, values in measured.items() if values and key not in _OWN}
        measured.clear()
        return row

    def measured(self) -> dict[str, list[float]]:
        """TRL's own lists of what it has measured in each micro-step, by the names of their curves."""
        own: Any = self
        found: dict[str, list[float]] = (own._stored_metrics if self._train.method == "orpo" else own._metrics)["train"]
        return found


class SftTrainer(MethodTrainer, trl.SFTTrainer):  # type: ignore[misc,name-defined]
    """Supervised fine-tuning on the job's own sequences."""

    counts_labels = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.train_dataset = self._sequences
        self.model_accepts_loss_kwargs = True  # the loss is TRL's, whatever the model's own takes

    def inputs_of(self, model: nn.Module, corpus: Corpus, train: TrainSection) -> dict[str, Any]:
        inputs = JobTrainer.inputs_of(self, model, corpus, train)
        # TRL accepts a dataset of arrow alone, and looks at its first row. The sequences, which are read from their
        # store as they are needed, take its place afterwards.
        self._sequences = inputs["train_dataset"]
        tensors = {name: each for name, each in self._sequences[0].items() if isinstance(each, torch.Tensor)}
        first = Dataset.from_list([{name: value.tolist() for name, value in tensors.items()}])
        return inputs | {"train_dataset": first, "processing_class": self._method_inputs.tokenizer}

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not {"attention_mask", "position_ids"} & inputs.keys():  # nothing is padded, and TRL counts tokens by one
            inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
        return super().compute_loss(model, inputs, *args, **kwargs)


class ReferredTrainer(MethodTrainer):
    """A method that holds the model to a reference, which is the model before training."""

    def inputs_of(self, model: nn.Module, corpus: Corpus, train: TrainSection) -> dict[str, Any]:
        return super().inputs_of(model, corpus, train) | {"ref_model": self._method_inputs.reference}


class DpoTrainer(ReferredTrainer, trl.DPOTrainer):  # type: ignore[misc,name-defined]
    """Direct preference optimization on pairs."""


class KtoTrainer(ReferredTrainer, trl.KTOTrainer):  # type: ignore[misc,name-defined]
    """Kahneman-Tversky optimization on completions that are wanted or not."""

    def inputs_of(self, model: nn.Module, corpus: Corpus, train: TrainSection) -> dict[str, Any]:
        # TRL pairs each row with the one before it in a batch, and so takes rows in their order, which may be by label.
        rows: Any = corpus.training
        return super().inputs_of(model, corpus, train) | {"train_dataset": rows.shuffle(seed=train.seed)}


class RewardTrainer(MethodTrainer, trl.RewardTrainer):  # type: ignore[misc,name-defined]
    """A reward model, whose score of the chosen is to be above that of the rejected."""


class DrawnTrainer(MethodTrainer):
    """A method on prompts, whose completions the model draws and the rewards judge."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self._train.drawn is not None
        self.beta = self._train.drawn.beta
        trained: Any = self.model
        self._parity = RolloutParity(trained, self._train, self._over_ranks) if self._train.parity else None
        self._compared: dict[str, Any] | None = None  # the batch whose log-probabilities are compared
        if self._parity is not None:
            self.add_callback(self._parity)
        if (reference := self._method_inputs.reference) is not None:
            disable_dropout_in_model(reference)
            add_fused_lm_head(reference, temperature=self._train.drawn.temperature)
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def inputs_of(self, model: nn.Module, corpus: Corpus, train: TrainSection) -> dict[str, Any]:
        return super().inputs_of(model, corpus, train) | {"reward_funcs": list(self._method_inputs.rewards)}

    def _over_ranks(self, value: torch.Tensor, how: str) -> torch.Tensor:
        gathered: torch.Tensor = self.accelerator.gather(value[None])
        return gathered.sum(0) if how == "sum" else gathered.amax(0)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self._parity.drawing() if self._parity else nullcontext():
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's batch, with the log-probabilities of what was drawn."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self._parity:
            with self.accelerator.autocast():
                batch[SCORES] = self._parity.scores(batch["completion_ids"])
        return batch

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._parity and self._parity.takes_positions:
            model = partial(at_positions_of_generation, model)
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]
        if self._parity and self._compared is not None and torch.is_grad_enabled():
            self._parity.compare(self._compared[SCORES], found[0], self._compared["completion_mask"])
        return found

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._compared = inputs if self._parity else None
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._compared = None

    def train(self, resume_from_checkpoint: Any = None, *others: Any, **more: Any) -> Any:
        self._teaches = bool(resume_from_checkpoint)  # what was drawn before is not known
        return super().train(resume_from_checkpoint, *others, **more)

    def curves(self) -> Row:
        """As TRL has measured.

        Raises JobFileError where no function judged any completion, or none told those of a prompt apart in the whole
        training: that teaches nothing.
        """
        names: list[str] = self.reward_func_names  # type: ignore[attr-defined]
        judged = zip(*(self.measured()[f"rewards/{name}/mean"] for name in names), strict=True)
        if any(all(math.isnan(mean) for mean in means) for means in judged):
            raise JobFileError(
                f"train.{self._train.method}.reward: {', '.join(names)} returned None for every completion up to step "
                f"{self.state.global_step}, so nothing is learned; return a number for those that are judged"
            )
        self._teaches |= any(share < 1 for share in self.measured()["frac_reward_zero_std"])
        if not (self._teaches or self.beta) and self.state.global_step >= self.state.max_steps:
            raise JobFileError(
                f"train.{self._train.method}.reward: {', '.join(names)} gave the completions of each prompt the same "
                f"reward in all {self.state.global_step} steps, so nothing was learned; reward what differs between "
                "them, or draw more (num_generations)"
            )
        return super().curves() | (self._parity.row() if self._parity else {})

    def _generate(self, *args: Any) -> Any:
        """As TRL does, without the routers' loss, which transformers would compute of a token and the prompt's mask."""
        config: Any = self.model.config.get_text_config()  # type: ignore[union-attr,operator]
        asked = getattr(config, "output_router_logits", None)
        if asked:
            config.output_router_logits = False
        try:
            return super()._generate(*args)  # type: ignore[misc]
        finally:
            if asked:
                config.output_router_logits = True

    def _get_num_items_in_batch(self, *args: Any) -> Any:
        return super(CorrectedTrainer, self)._get_num_items_in_batch(*args)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return super(JobTrainer, self)._get_train_sampler(*args, **kwargs)


class GrpoTrainer(DrawnTrainer, trl.GRPOTrainer):  # type: ignore[misc,name-defined]
    """Group relative policy optimization, which may send tokens to the experts that they were drawn with."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        replays = self._train.grpo is not None and self._train.grpo.replay_routers
        with RolloutReplay(self.model) if replays else nullcontext():  # type: ignore[arg-type]
            return super().train(*args, **kwargs)


class RlooTrainer(DrawnTrainer, trl.RLOOTrainer):  # type: ignore[misc,name-defined]
    """REINFORCE leave-one-out."""


def trainer_class(method: str) -> type[MethodTrainer]:
    """The trainer of one of TRL's methods; TRL's own for ORPO is imported only for it."""
    if method == "orpo":
        return type("OrpoTrainer", (MethodTrainer, orpo().ORPOTrainer), {})
    kind: type[MethodTrainer] = globals()[f"{method.capitalize()}Trainer"]
    return kind
