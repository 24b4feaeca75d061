"""``VeOmniCallback`` for TRL's trainers, which compute their losses themselves. It imports nothing of TRL."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from veomni_bridges import transformers
from veomni_bridges.libraries import require
from veomni_bridges.losses import LOGPROBS, with_eager_losses, with_log_probabilities
from veomni_bridges.trl_heads import FusedHeads, fused_forward
from veomni_core import Binding, OpsConfig
from veomni_core.errors import BindingError, ConfigError
from veomni_transformers.rollout_replay import RolloutReplay


class VeOmniCallback(transformers.VeOmniCallback):
    """Binds the model of an ``SFTTrainer``, ``DPOTrainer``, ``GRPOTrainer`` or another of TRL's.

    It is :class:`veomni_bridges.transformers.VeOmniCallback` for trainers that compute their losses themselves. The
    model's own losses are left eager, since they never run. While TRL trains, the kernel of ``token_logprobs`` computes
    the log-probabilities in TRL's fused head, once it was compared with TRL's own function there; a preset fills that
    field with ``auto``. A reference model is not bound; call :func:`veomni_core.bind` for it.

    Args:
        config, verify, undo, **fields: as there; the config is a mapping.
        replay_routers: whether what the model draws is trained on the experts that it was drawn with: see
            :class:`veomni_transformers.rollout_replay.RolloutReplay`. A reference model chooses by itself.

    Raises:
        ConfigError: a kernel is named for a loss that TRL computes itself; or as there.
        BindingError: when training begins, a kernel is named for ``token_logprobs`` and this trainer has no fused head;
            or as there.
        ConformanceError: when training begins, that kernel does not compute what TRL's own function computes.
        HostError: when the trainer is made, if TRL is older than 1.9.
        RouterReplayError: when the trainer is made, if routers are replayed and one is not proven.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        verify: bool = False,
        undo: bool = False,
        replay_routers: bool = False,
        **fields: Any,
    ) -> None:
        if isinstance(config, OpsConfig):
            raise ConfigError("give TRL's callback its config as a mapping, since it adds that the losses stay eager")
        super().__init__(config, verify=verify, undo=undo, **fields)
        written = fields if config is None else config
        config = with_eager_losses(written, "TRL's trainers")
        self._config = with_log_probabilities(config) if _has_fused_heads() else config
        self._names_logprobs = written.get(LOGPROBS, "eager") not in ("eager", "auto")
        self._heads: FusedHeads | None = None
        self._replays, self._replay = replay_routers, ExitStack()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        require("trl", "1.9", extra="trl")
        if self._replays:
            RolloutReplay(kwargs["model"]).close()  # refused here, before anything is drawn
        super().on_init_end(args, state, control, **kwargs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.binding is not None and self.binding.active:
            self._heads = FusedHeads(self.binding)
            if self._names_logprobs and not self._heads.kernels:
                self._heads = None
                raise BindingError(
                    f"{LOGPROBS} names a kernel, and this trainer computes no log-probabilities by a fused head "
                    f"(add_fused_lm_head of trl 1.16), but from the model's outputs: leave {LOGPROBS} out"
                )
        super().on_train_begin(args, state, control, **kwargs)
        if self._replays:
            self._replay.enter_context(RolloutReplay(kwargs["model"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._replay.close()
        if self._heads is not None and self._heads.active:
            self._heads.undo()
        super().on_train_end(args, state, control, **kwargs)

    def notes(self, args: TrainingArguments) -> tuple[str, ...]:
        assert self.binding is not None, "the base class asks for notes once it has bound"
        return tuple(_notes(args, self.binding, self._heads))

    def _problems_of_library(self, args: TrainingArguments) -> Iterator[str]:
        if not transformers.is_of_trl(args):
            yield "this trainer is none of TRL's; pass the VeOmniCallback of veomni_bridges.transformers"
        others = ("use_vllm", "use_transformers_continuous_batching", "torch_compile")
        if self._replays and not hasattr(args, "num_generations"):
            yield "this trainer draws nothing, so there are no experts to replay; leave replay_routers out"
        elif self._replays and (named := [each for each in others if getattr(args, each, False)]):
            yield f"experts are known of what the model itself draws; leave out replay_routers or {named[0]}"


def _has_fused_heads() -> bool:
    """Whether the TRL that is imported computes log-probabilities by fused heads, as 1.16 does and 1.9 does not."""
    return hasattr(sys.modules.get("trl.trainer.utils"), "add_fused_lm_head")


def _notes(args: TrainingArguments, binding: Binding, heads: FusedHeads | None) -> Iterator[str]:
    fused = [path or "the model" for path, module in binding.model.named_modules() if fused_forward(module)]
    if fused:
        computed_by = heads.describe() if heads is not None and heads.kernels else "TRL's own function"
        yield (
            f"TRL has given {' and '.join(fused)} a forward of its own (add_fused_lm_head), which computes the loss of "
            f"its trainer from log-probabilities. {computed_by} computes those. The model's own losses, which are left "
            "eager, don't run"
        )
    else:
        yield "TRL's trainer computes its loss from the model's outputs. So the model's own losses don't run"
    if getattr(args, "beta", 0):
        yield (
            "the trained model alone is bound. If this trainer has a reference model, it runs eager: "
            "bind(trainer.ref_model, config, training=False) puts kernels into it"
        )
