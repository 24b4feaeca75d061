"""``kernels``: a callback for ms-swift, which a file of the user's puts into its map of callbacks under a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from veomni_bridges import transformers
from veomni_bridges.libraries import require
from veomni_core import OpsConfig

# Arguments by which ms-swift computes the loss from the logits.
_OWN_LOSSES = ("loss_type", "enable_dft_loss", "enable_channel_loss", "label_smoothing_factor")


def kernels(
    config: OpsConfig | Mapping[str, Any] | None = None, *, verify: bool = False, undo: bool = False, **fields: Any
) -> Callable[..., VeOmniCallback]:
    """What ms-swift calls with its arguments and its trainer, for a callback that binds that trainer's model.

    Args:
        config, verify, undo, **fields: as of :class:`veomni_bridges.transformers.VeOmniCallback`.

    Raises:
        ConfigError: at once, if the config is given twice or is wrong.
    """
    settings = {"verify": verify, "undo": undo, **fields}
    VeOmniCallback(None, config, **settings)
    OpsConfig.of(fields if config is None else config)
    return lambda args, trainer: VeOmniCallback(trainer, config, **settings)


class VeOmniCallback(transformers.VeOmniCallback):
    """Binds the model of ms-swift's trainers for ``swift sft`` and ``swift pt`` when they are made.

    It is :class:`veomni_bridges.transformers.VeOmniCallback`, and refuses what ms-swift itself can put into the
    model's forwards. Where ms-swift is asked for a loss of its own, the receipt says that the model's doesn't run.

    Args:
        trainer: ms-swift's trainer.
        config, **settings: as there.

    Raises:
        ConfigError: as there.
        BindingError: when the trainer is made, if the job asks for Unsloth, sequence parallelism, or preference
            training, or as there.
        HostError: when the trainer is made, if ms-swift is older than 4.6.
    """

    def __init__(self, trainer: Any, config: OpsConfig | Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._trainer = trainer

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        require("ms_swift", "4.6", extra="ms-swift")
        super().on_init_end(args, state, control, **kwargs)

    def notes(self, args: TrainingArguments) -> tuple[str, ...]:
        asked = [f"{key}: {value}" for key in _OWN_LOSSES if (value := getattr(args, key, None))]
        if not self._trainer.template.loss_scale.is_binary_loss_scale:
            asked.append("a loss_scale with weights")
        if not asked:
            return ()
        return (f"ms-swift computes the loss itself, by {', '.join(asked)}. So the model's own loss doesn't run",)

    def _problems_of_library(self, args: TrainingArguments) -> Iterator[str]:
        if transformers.is_of_trl(args):
            yield "preference training in ms-swift was not tested with bound models; leave the callback out"
        if getattr(args, "tuner_backend", "peft") == "unsloth":
            yield "Unsloth replaces forwards when it loads the model; set --tuner_backend peft"
        if self._trainer.template.sequence_parallel_size > 1:
            yield "ms-swift's sequence parallelism replaces attention; set --sequence_parallel_size 1"
