"""The first steps of a training, in which each bound site's own code runs beside its kernel."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState

from veomni_core import Shadow
from veomni_core.errors import BindingError
from veomni_trainer.loop.expert_loads import ExpertLoads
from veomni_trainer.run.console import print_once


class ShadowedSteps(TrainerCallback):
    """Ends training on all processes where a kernel and its module's own code differ, before the weights change.

    Args:
        model: the model that the kernels are bound in.
        steps: in how many steps it looks, counted from the first one of this run.
        loads: what counts the experts' rows; what runs beside the training is left out.
    """

    def __init__(self, model: nn.Module, steps: int, loads: ExpertLoads | None) -> None:
        self._model, self._left, self._loads = model, steps, loads
        self._shadow: Shadow | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._shadow = shadow = Shadow(self._model)
        if self._loads is not None:
            self._loads.is_paused = lambda: shadow.replaying

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._shadow is not None:
            self._shadow.raise_if_breached(f"step {state.global_step + 1}")
            if not self._shadow.compared:
                raise BindingError(f"train.shadow compared nothing:\n{self._shadow.describe()}")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._shadow is None:
            return
        self._left -= 1
        if not self._left or control.should_training_stop:
            self._shadow.end()
            print_once(f"equal to their own code until step {state.global_step}: {self._shadow.describe()}")
            self._shadow = None

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._shadow is not None:
            self._shadow.end()
