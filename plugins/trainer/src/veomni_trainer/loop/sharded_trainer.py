"""transformers' ``Trainer`` for models that transformers has sharded: what it refuses or computes otherwise there."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from veomni_core.errors import ConfigError
from veomni_core.kernels import IGNORED
from veomni_trainer.data.batches import learned_labels
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.accumulation import gradients_apart
from veomni_trainer.output.shards import is_sharded, load_optimizer, save_optimizer, save_weights

_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")  # in a scheduler's state: one value per group of parameters


class ShardedTrainer(Trainer):
    """A ``Trainer`` of the job's ``train`` section. Where that section shards nothing, it is ``Trainer``.

    transformers 5.23 clips gradients over several device meshes by itself, and doesn't save what it could resume.

    Attributes:
        learned_tokens: how many labels the step learns, over all ranks; ``None`` where the method counts otherwise.
    """

    learned_tokens: torch.Tensor | None = None

    def __init__(self, train: TrainSection, *args: Any, **kwargs: Any) -> None:
        self._train = train
        super().__init__(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Without accelerate's own tensor parallelism: it refuses CPUs, and has nothing to add to a sharded model."""
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        args.pop("parallelism_config", None)
        return args

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | None:
        """The labels that a step learns, on average over the ranks: each rank divides the sum of its losses by it.

        Gradients are averaged over ranks, so that gives the mean over all learned tokens of the step, however many each
        rank and micro-batch has. The labels of all ranks would make it smaller by the number of ranks; ``Trainer`` then
        multiplies the loss, and with it the experts' load-balancing loss, which it had not divided. Ranks with the same
        batch all count it, and so don't change the mean.

        A step without any label divides by one: its loss is 0.

        Raises:
            ConfigError: the model always divides by the labels of a micro-batch, a step has several, and not all labels
                are learned.
        """
        if not batch_samples:
            return None
        labels = sum(learned_labels(batch["labels"]) for batch in batch_samples)
        mean: torch.Tensor = self.accelerator.reduce(torch.as_tensor(labels, device=device).float(), "mean")
        self.learned_tokens = mean * (self.args.world_size // self._train.ranks_per_batch)
        if not self.model_accepts_loss_kwargs:
            several = len(batch_samples) * self.args.world_size > 1
            if several and any((batch["labels"] == IGNORED).any() for batch in batch_samples):
                raise ConfigError(
                    f"{type(self.model).__name__} computes each micro-batch's mean loss by itself, so a token would "
                    "count more the fewer are learned beside it. Train it in one process with gradient_accumulation: "
                    "1, or on data of which every token is learned: texts without packing, or data.loss_on: all"
                )
            return None
        return mean.clamp_min(1)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        model: Any = self.model
        accumulates = self._train.tp_size > 1 and self._train.gradient_accumulation > 1
        with gradients_apart(model) if accumulates else nullcontext():
            return super().training_step(*args, **kwargs)

    def _defer_fsdp_gradient_reduction(self) -> Any:
        """Under tensor parallelism FSDP reduces each micro-batch's gradients; ``accumulation`` says why."""
        return nullcontext() if self._train.tp_size > 1 else super()._defer_fsdp_gradient_reduction()

    @property
    def _saves_shards(self) -> bool:
        """Whether each process writes its own part. An adapter lies whole on each, so the first process writes it."""
        return self._train.is_sharded and not hasattr(self.model, "peft_config")

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Average the gradients of an adapter over a sharded model, once a step.

        As ``Trainer`` does it, but by a sum and a quotient: gloo has no mean.
        """
        if not self._train.is_sharded or self.args.world_size == 1:
            return

        def average(parameter: torch.Tensor) -> None:
            if self.accelerator.sync_gradients and parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self.args.world_size

        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter.data, DTensor):
                with torch.no_grad():
                    distributed.broadcast(parameter.data, src=0)
                parameter.register_post_accumulate_grad_hook(average)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self._saves_shards:
            return super()._save(output_dir, state_dict)
        model: Any = self.model
        save_weights(model, Path(output_dir or str(self.args.output_dir)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._saves_shards:
            return super()._save_optimizer_and_scheduler(output_dir)
        model, optimizer, scheduler = self._trained()
        save_optimizer(model, optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_sharded(Path(checkpoint)):
            return super()._load_optimizer_and_scheduler(checkpoint)
        model, optimizer, scheduler = self._trained()
        load_optimizer(model, optimizer, Path(checkpoint))
        state = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        # transformers makes a group of parameters per device mesh, so there may be more or fewer of them now. All have
        # the same learning rate.
        groups = len(optimizer.param_groups)
        scheduler.load_state_dict(
            {key: each[:1] * groups if key in _PER_GROUP else each for key, each in state.items()}
        )

    def _trained(self) -> tuple[Any, Any, Any]:
        """The model, torch's optimizer inside accelerate's, and the scheduler."""
        optimizer: Any = self.optimizer
        return self.model, optimizer.optimizer, self.lr_scheduler
