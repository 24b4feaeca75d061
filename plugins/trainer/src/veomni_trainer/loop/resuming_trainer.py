"""transformers' ``Trainer`` where a run goes on: what comes from the checkpoint, and what from the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from veomni_core.errors import CheckpointError, VeOmniError
from veomni_trainer.loop.sharded_trainer import ShardedTrainer
from veomni_trainer.output.shards import reason

_SETTINGS = ("weight_decay", "betas", "eps", "momentum", "initial_lr")  # of a group of parameters, beside ``lr``


class ResumingTrainer(ShardedTrainer):
    """A ``Trainer`` that goes on from a checkpoint with the job's own settings, and says so where it can't.

    The optimizer's moments, the random states and the position in the data are the checkpoint's. ``Trainer`` takes the
    learning rate, the weight decay and the steps between two lines of the log from there too, whatever the job says.
    """

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
            super()._load_optimizer_and_scheduler(checkpoint)

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
