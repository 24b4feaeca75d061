"""Replays the experts of generated tokens wherever the model runs on them again, as post-training loops do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from veomni_transformers.router_replay import (
    OWN,
    RecordedChoices,
    RouterChoices,
    RouterReplayError,
    WatchedRouters,
    proven_routers,
)

__all__ = ("RolloutReplay",)


class RolloutReplay:
    """Records the experts of what ``model.generate`` draws, and replays them in later forwards of the same tokens.

    A loop may shuffle, split and pad what it has drawn: rows are found by their tokens. Rows of the same tokens are
    replayed as the first of them that was drawn. The token that was drawn last has not been through the model, so its
    router chooses by itself. So do all routers under another adapter than that which drew, as a reference's under PEFT.
    What a model in evaluation mode draws is kept apart. A replay lasts until the next forward: backward may run
    checkpointed layers again. Used as a context manager, it calls :meth:`close` on exit.

    Args:
        model: a transformers model with proven routers, bound or not, or a PEFT model.

    Raises:
        RouterReplayError: a layer's router is not proven. In a forward: a row was not drawn, or not by a cache of its
            tokens alone.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> config = MixtralConfig(**shape, num_key_value_heads=4, num_local_experts=4, vocab_size=64)
        >>> model = MixtralForCausalLM(config)
        >>> with RolloutReplay(model) as replay:
        ...     drawn = model.generate(torch.tensor([[5, 9], [7, 3]]), max_new_tokens=3, do_sample=True, pad_token_id=0)
        ...     logits = model(drawn.flip(0)).logits
        ...     replay.replayed.indices.shape
        torch.Size([2, 5, 2, 2])

    Attributes:
        replayed: the choices of the last forward, as they were laid out for it; ``None`` if it replayed none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)
        routers = proven_routers(self._model)
        self._experts = tuple(router.chooser.experts for router in routers)
        self._watched = WatchedRouters(self._model, routers, "rollout replay")
        self._rollouts: dict[bool, list[_Rollout]] = {True: [], False: []}
        self._used = {True: False, False: False}
        self._drawing: _Rollout | None = None
        self.replayed: RouterChoices | None = None
        # Beneath the head, which is called alike by generate and by loops that have put a head of their own on it. Not
        # by register_forward_pre_hook, which a bound module takes for a change of what was proven.
        self._decoder: Any = getattr(self._model, "base_model", self._model)
        self._handle = RemovableHandle(
            self._decoder._forward_pre_hooks, extra_dict=self._decoder._forward_pre_hooks_with_kwargs
        )
        self._decoder._forward_pre_hooks[self._handle.id] = lambda module, args, kwargs: self._before(
            module, args, kwargs
        )
        self._decoder._forward_pre_hooks_with_kwargs[self._handle.id] = True

    def close(self) -> None:
        """Record and replay no more, and leave the model as it was."""
        self._handle.remove()
        self._watched.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not self._decoder:  # a copy's
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if not isinstance(ids, Tensor) or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
            raise RouterReplayError(
                "rows are known by input_ids [B, T] and attention_mask [B, T], and this forward has "
                f"{type(ids).__name__} and {type(mask).__name__} of another shape"
            )
        if (cache := kwargs.get("past_key_values")) is not None:
            cache.reorder_cache = _refuse_beams
            self._draw(ids, mask, cache.get_seq_length())
        else:
            self._replay(ids, torch.ones_like(ids) if mask is None else mask)

    def _draw(self, ids: Tensor, mask: Tensor | None, before: int) -> None:
        mode = self._model.training
        if before == 0:
            if self._used[mode]:
                self._rollouts[mode], self._used[mode] = [], False
            recorded = RecordedChoices(self._experts)
            self._watched.record(recorded)
            self._drawing = _Rollout(recorded, [], ids[:, :0], _adapters(self._model))
            self._rollouts[mode].append(self._drawing)
        if self._drawing is None or self._drawing.fed != before:
            raise RouterReplayError(
                f"a cache of {before} tokens is not the one that the last generation began with: draw by sampling, "
                "without assistance"
            )
        self._drawing.ids.append(ids)
        self._drawing.mask = torch.ones_like(torch.cat(self._drawing.ids, 1)) if mask is None else mask

    def _replay(self, ids: Tensor, mask: Tensor) -> None:
        self._watched.leave()
        self._drawing, self.replayed, mode = None, None, self._model.training
        adapters = _adapters(self._model)
        rollouts = [each for each in self._rollouts[mode] if each.adapters == adapters]
        if self._rollouts[mode] and not rollouts:  # another model, as far as routers go
            return
        self._used[mode] = True
        rows = [row for each in rollouts for row in each.rows()]
        shape = (*ids.shape, len(self._experts), rows[0][1].shape[-1] if rows else 1)
        indices = torch.full(shape, OWN, dtype=torch.int32, device=ids.device)
        for number, (row, kept) in enumerate(zip(ids, mask.bool(), strict=True)):
            indices[number, kept.nonzero()[:, 0]] = _choices_of(row[kept].tolist(), rows, number)
        self.replayed = RouterChoices(indices, self._experts)
        self._watched.replay(self.replayed)


@dataclass(eq=False)
class _Rollout:
    """One generation: the tokens that went through the model, and where they went."""

    recorded: RecordedChoices
    ids: list[Tensor]  # of each forward [B, t]
    mask: Tensor  # [B, T] of the last one
    adapters: Any
    _rows: list[tuple[list[int], Tensor]] = field(default_factory=list)

    @property
    def fed(self) -> int:
        return sum(each.shape[1] for each in self.ids)

    def rows(self) -> list[tuple[list[int], Tensor]]:
        """Of each row, without padding, its N tokens and their experts ``[N, L, K]``."""
        if not self._rows:
            kept = self.mask.bool()
            each = zip(torch.cat(self.ids, 1), self.recorded.choices.indices, kept, strict=True)
            self._rows = [(tokens[k].tolist(), experts[k]) for tokens, experts, k in each]
        return self._rows


def _choices_of(row: list[int], rows: list[tuple[list[int], Tensor]], number: int) -> Tensor:
    """The experts ``[N, L, K]`` of the N tokens of ``row``, from the first of ``rows`` that has all but the last."""
    for tokens, experts in rows:
        shared = min(len(row), len(tokens))
        if shared >= len(row) - 1 and tokens[:shared] == row[:shared]:
            rest = experts.new_full((len(row) - shared, *experts.shape[1:]), OWN)
            return torch.cat([experts[:shared], rest])
    raise RouterReplayError(
        f"row {number} of this forward, of {len(row)} tokens, is none of the {len(rows)} that the model's generate has "
        "drawn last with a cache: its experts are not known. Draw with the model itself (not by vLLM or in continuous "
        "batches), or train without replay"
    )


def _refuse_beams(beam_idx: Tensor) -> None:
    raise RouterReplayError("beams change the places of rows, whose experts are then another's: draw by sampling")


def _adapters(model: nn.Module) -> Any:
    """Which of PEFT's adapters run."""
    layers: Any = (each for each in model.modules() if isinstance(getattr(each, "disable_adapters", None), bool))
    return next(((each.disable_adapters, tuple(each.active_adapters)) for each in layers), None)
