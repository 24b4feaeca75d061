"""``VeOmniCallback`` for TRL's trainers, which compute their losses themselves. It imports nothing of TRL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from veomni_bridges import transformers
from veomni_bridges.libraries import require
from veomni_bridges.losses import with_eager_losses
from veomni_core import OpsConfig
from veomni_core.errors import ConfigError


class VeOmniCallback(transformers.VeOmniCallback):
    """Binds the model of an ``SFTTrainer``, ``DPOTrainer``, ``GRPOTrainer`` or another of TRL's.

    It is :class:`veomni_bridges.transformers.VeOmniCallback` with the losses left eager. TRL's trainers compute theirs
    themselves, so the model's own loss never runs, and the receipt says so. A reference model is not bound; call
    :func:`veomni_core.bind` for it.

    Args:
        config, verify, undo, **fields: as there; the config is a mapping.

    Raises:
        ConfigError: a kernel is named for a loss that TRL computes itself; or as there.
        BindingError: as there.
        HostError: when the trainer is made, if TRL is older than 1.9.
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, *, verify: bool = False, undo: bool = False, **fields: Any
    ) -> None:
        if isinstance(config, OpsConfig):
            raise ConfigError("give TRL's callback its config as a mapping, since it adds that the losses stay eager")
        super().__init__(config, verify=verify, undo=undo, **fields)
        self._config = with_eager_losses(fields if config is None else config, "TRL's trainers")

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        require("trl", "1.9", extra="trl")
        super().on_init_end(args, state, control, **kwargs)

    def notes(self, args: TrainingArguments) -> tuple[str, ...]:
        assert self.binding is not None, "the base class asks for notes once it has bound"
        return tuple(_notes(args, self.binding.model))

    def _problems_of_library(self, args: TrainingArguments) -> Iterator[str]:
        if not transformers.is_of_trl(args):
            yield "this trainer is none of TRL's; pass the VeOmniCallback of veomni_bridges.transformers"


def _notes(args: TrainingArguments, model: nn.Module) -> Iterator[str]:
    fused = [path or "the model" for path, module in model.named_modules() if _from_trl(vars(module).get("forward"))]
    if fused:
        yield (
            f"TRL has given {' and '.join(fused)} a forward of its own (add_fused_lm_head), which computes the "
            "log-probabilities and the loss of its trainer. So the model's own losses, which are left eager, don't run"
        )
    else:
        yield "TRL's trainer computes its loss from the model's outputs. So the model's own losses don't run"
    if getattr(args, "beta", 0):
        yield (
            "the trained model alone is bound. If this trainer has a reference model, it runs eager: "
            "bind(trainer.ref_model, config, training=False) puts kernels into it"
        )


def _from_trl(forward: Any) -> bool:
    """Whether a module's own ``forward``, which may wrap another one, was put there by TRL."""
    function = getattr(forward, "__func__", forward)
    while function is not None:
        if getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] == "trl":
            return True
        function = getattr(getattr(function, "__wrapped__", None), "__func__", getattr(function, "__wrapped__", None))
    return False
