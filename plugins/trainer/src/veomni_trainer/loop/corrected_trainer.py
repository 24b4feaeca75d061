"""transformers' ``Trainer`` where it would refuse a sharded model, count otherwise, or forget what the job says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from veomni_core.errors import CheckpointError, ConfigError, VeOmniError
from veomni_core.kernels import IGNORED
from veomni_trainer.data.batches import learned_labels
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.output.shards import is_sharded, load_optimizer, reason, save_optimizer, save_weights

_SETTINGS = ("weight_decay", "betas", "eps", "momentum", "initial_lr")  # of a group of parameters, beside ``lr``


class CorrectedTrainer(Trainer):
    """A ``Trainer`` of the job's ``train`` section, which goes on from a checkpoint with the job's own settings.

    Of a checkpoint it takes the optimizer's moments, the random states and the position in the data. ``Trainer`` takes
    the learning rate, the weight decay and the steps between two lines of the log from there too, in place of the
    job's.

    transformers 5.23 clips gradients over several device meshes by itself, and doesn't save what it could resume.

    Attributes:
        counts_labels: whether a step's loss is divided by the labels that it learns; else it is a mean already.
        learned_tokens: how many labels the step learns, over all ranks; ``None`` where the method counts otherwise.
    """

    counts_labels = True
    learned_tokens: Tensor | None = None

    def __init__(self, train: TrainSection, *args: Any, **kwargs: Any) -> None:
        self._train = train
        super().__init__(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Without accelerate's own tensor parallelism: it refuses CPUs, and has nothing to add to a sharded model."""
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        args.pop("parallelism_config", None)
        return args

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
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
        if not batch_samples or not self.counts_labels:
            return None
        labels = sum(learned_labels(batch["labels"]) for batch in batch_samples)
        mean: Tensor = self.accelerator.reduce(torch.as_tensor(labels, device=device).float(), "mean")
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

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().get_batch_samples(*args, **kwargs)
        except VeOmniError as error:  # of a process that makes batches: torch puts the trace into its message
            kind = type(error)
            _, mark, message = str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
            if not mark:
                raise
            raise kind(message.rstrip()) from error

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        model: Any = self.model
        accumulates = self._train.tp_size > 1 and self._train.gradient_accumulation > 1
        with _gradients_apart(model) if accumulates else nullcontext():
            return super().training_step(*args, **kwargs)

    def _defer_fsdp_gradient_reduction(self) -> Any:
        """Under tensor parallelism FSDP reduces each micro-batch's gradients; ``_gradients_apart`` says why."""
        return nullcontext() if self._train.tp_size > 1 else super()._defer_fsdp_gradient_reduction()

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Average the gradients of an adapter over a sharded model, once a step.

        As ``Trainer`` does it, but by a sum and a quotient: gloo has no mean.
        """
        if not self._train.is_sharded or self.args.world_size == 1:
            return

        def average(parameter: Tensor) -> None:
            if self.accelerator.sync_gradients and parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self.args.world_size

        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter.data, DTensor):
                with torch.no_grad():
                    distributed.broadcast(parameter.data, src=0)
                parameter.register_post_accumulate_grad_hook(average)

    @property
    def _saves_shards(self) -> bool:
        """Whether each process writes its own part. An adapter lies whole on each, so the first process writes it."""
        return self._train.is_sharded and not hasattr(self.model, "peft_config")

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

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        trained = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return trained

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the core has already loaded the weights when it built the model.

        ``Trainer`` would load them without reverting the renaming and splitting that ``save_pretrained`` does, and so
        continue with randomly initialised experts.
        """

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _naming_damage(checkpoint, "optimizer or scheduler.pt"), self._with_settings_of_the_job():
            if not is_sharded(Path(checkpoint)):
                return super()._load_optimizer_and_scheduler(checkpoint)
            model, optimizer, scheduler = self._trained()
            load_optimizer(model, optimizer, Path(checkpoint))
            state = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
            # transformers makes a group of parameters per device mesh, so it may have had more or fewer of them.
            scheduler.load_state_dict(state | {"lr_lambdas": []})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _naming_damage(checkpoint, "rng_state"):
            super()._load_rng_state(checkpoint)

    @contextmanager
    def _with_settings_of_the_job(self) -> Iterator[None]:
        """Load states in this context; the settings that came with them give way to those that were there before."""
        optimizer: Any = self.optimizer
        scheduler: Any = self.lr_scheduler
        settings = [{key: group[key] for key in _SETTINGS if key in group} for group in optimizer.param_groups]
        highest = list(scheduler.base_lrs)
        yield
        scheduler.base_lrs = highest
        # The schedule is the job's own at the step at which the run goes on: a state doesn't hold its function.
        rates = [
            rate * schedule(scheduler.last_epoch) for rate, schedule in zip(highest, scheduler.lr_lambdas, strict=True)
        ]
        for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
            group |= own | {"lr": rate}
        scheduler._last_lr = rates

    def _trained(self) -> tuple[Any, Any, Any]:
        """The model, torch's optimizer inside accelerate's, and the scheduler."""
        optimizer: Any = self.optimizer
        return self.model, optimizer.optimizer, self.lr_scheduler


@contextmanager
def _gradients_apart(model: nn.Module) -> Iterator[None]:
    """Take the gradients of whole parameters aside for one backward, and add them afterwards.

    Under tensor parallelism a parameter that every rank holds whole, but uses for its own heads only (``q_norm`` of
    Qwen3), gets a hook that sums ``parameter.grad`` over the group after each backward. What an earlier micro-batch
    left there would be summed again.
    """
    aside = [(p, p.grad) for p in model.parameters() if p.grad is not None and not isinstance(p, DTensor)]
    for parameter, _ in aside:
        parameter.grad = None
    yield
    for parameter, before in aside:
        if parameter.grad is not None:
            before += parameter.grad
        parameter.grad = before


@contextmanager
def _naming_damage(checkpoint: str, name: str) -> Iterator[None]:
    """Turn what torch raises for a damaged file, or for the state of another model, into an error that names it."""
    try:
        yield
    except VeOmniError:
        raise
    except Exception as error:  # of pickle, of zip files, of shapes
        raise CheckpointError(
            f"{Path(checkpoint)}: its {name} is damaged, or does not fit this job: {reason(error)}. Go on from another "
            "checkpoint with --resume=PATH"
        ) from error


def weight_of_aux_loss(loss: Tensor, aux_loss: Tensor, model: Any) -> Tensor | float:
    """By what a model multiplies its routers' loss before it adds it: their derivative, or else what its config names.

    A wrapper, such as DDP or a compiled model, may return the two by one function, past which nothing is derived.
    """
    if aux_loss.requires_grad and aux_loss.grad_fn is not None:
        (weight,) = torch.autograd.grad(loss, aux_loss, retain_graph=True, allow_unused=True)
        if weight is not None:
            return weight
    config = model.config.get_text_config()
    return float(getattr(config, "router_aux_loss_coef", getattr(config, "aux_loss_coef", 0.0)))
