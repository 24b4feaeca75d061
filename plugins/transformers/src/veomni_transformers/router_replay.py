"""Records which experts a rollout's tokens went to, and sends the same tokens to the same experts in training.

A router's scores differ in their last bits between two forwards of the same tokens. So does the choice, where two
experts are nearly as good, and then the whole layer's result. Replay takes the rollout's experts, and weighs them as
the training's forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.changes.transformation import Transformation
from veomni_core.errors import ConfigError
from veomni_core.sites.walk import named_modules
from veomni_transformers.proving import probe
from veomni_transformers.proving.code_reading import Readings
from veomni_transformers.proving.functions import current_forward
from veomni_transformers.proving.proof import ProvenOnce
from veomni_transformers.routers.choices import Forced, indices_in
from veomni_transformers.routers.proof import Chooser, experts_of, prove_router

__all__ = ("RecordedChoices", "RouterChoices", "RouterReplayError", "record_router", "router_replay")

OWN = -1  # in the place of an expert: the router chooses by itself


class RouterReplayError(ConfigError):
    """Choices that can't be recorded in this model, or replayed in it."""


@dataclass(frozen=True)
class RouterChoices:
    """Which experts each token went to, in each layer that has a router.

    Attributes:
        indices: ``[B, T, L, K]`` of int32: for each position, the experts in each of the ``L`` layers. At positions of
            -1 routers choose by themselves.
        experts: how many experts each of the layers chooses among.

    Example:
        >>> choices = RouterChoices(torch.tensor([[[[9, 9]], [[0, 1]]], [[[1, 2]], [[2, 3]]]]), experts=(10,))
        >>> mask = torch.tensor([[0, 1], [1, 1]])  # the first sequence is padded on the left
        >>> packed = choices.packed(mask)
        >>> packed.indices[:, :, 0].tolist()
        [[[0, 1], [1, 2], [2, 3]]]
        >>> packed.padded(torch.tensor([[1, 0], [1, 1]])).indices[:, :, 0].tolist()  # now on the right
        [[[0, 1], [-1, -1]], [[1, 2], [2, 3]]]
    """

    indices: Tensor
    experts: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tensor("indices", self.indices, "[B, T, L, K]")
        if not isinstance(self.experts, Sequence):
            raise RouterReplayError(f"experts are {self.experts!r}; give a number for each layer, as (8, 8)")

    def packed(self, mask: Tensor) -> RouterChoices:
        """Those of the tokens that ``mask[B, T]`` keeps, one row after the other, as one sequence ``[1, N]``."""
        places = _places(mask, self.indices)
        if mask.shape != self.indices.shape[:2]:
            raise RouterReplayError(
                f"the mask is {list(mask.shape)}, and choices are of {list(self.indices.shape[:2])}"
            )
        return replace(self, indices=self.indices[places][None])

    def padded(self, mask: Tensor) -> RouterChoices:
        """These tokens, in their order, at the positions that ``mask[B, T]`` keeps; others choose by themselves."""
        places = _places(mask, self.indices)
        if int(places.sum()) != self.indices.shape[:2].numel():
            raise RouterReplayError(
                f"the mask keeps {int(places.sum())} positions, and there are choices of "
                f"{self.indices.shape[:2].numel()} tokens: packed(mask) leaves out those of padding first"
            )
        indices = self.indices.new_full((*mask.shape, *self.indices.shape[2:]), OWN)
        indices[places] = self.indices.flatten(0, 1)
        return replace(self, indices=indices)


def _places(mask: Tensor, beside: Tensor) -> Tensor:
    """Where ``mask[B, T]`` is 1. A mask to be added, of 0 and below, says the opposite."""
    _check_tensor("the mask", mask, "[B, T]")
    if mask.dim() != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        raise RouterReplayError(f"the mask is {mask.dtype} {list(mask.shape)}: expected [B, T] of 1 (kept) and 0")
    return mask.to(beside.device).bool()


def _check_tensor(name: str, given: Any, shape: str) -> None:
    if not isinstance(given, Tensor):
        raise RouterReplayError(f"{name}: expected a tensor {shape}, not {type(given).__name__}")


class RecordedChoices:
    """What is recorded while :func:`record_router` is entered, and afterwards."""

    def __init__(self, experts: Sequence[int]) -> None:
        self._experts = tuple(experts)
        self._forwards: list[list[Tensor]] = [[] for _ in experts]

    def add(self, layer: int, indices: Tensor) -> None:
        """Note ``indices[B, T, K]`` of one forward."""
        self._forwards[layer].append(indices.detach().to(torch.int32))

    @property
    def choices(self) -> RouterChoices:
        """The choices of all forwards, one after the other: of a generation with a cache, those of its tokens.

        Raises:
            RouterReplayError: no forward ran, or forwards and layers don't fit each other.
        """
        counts = {len(each) for each in self._forwards}
        if len(counts) != 1 or counts == {0}:
            raise RouterReplayError(
                f"routers were run {sorted(counts)} times, expected each as often, and at least once"
            )
        batches = {each.shape[0] for layer in self._forwards for each in layer}
        widths = {each.shape[-1] for layer in self._forwards for each in layer}
        if len(batches) != 1 or len(widths) != 1:
            raise RouterReplayError(
                f"forwards of batches of {sorted(batches)} sequences chose {sorted(widths)} experts: record each "
                "rollout by itself"
            )
        return RouterChoices(torch.stack([torch.cat(each, 1) for each in self._forwards], 2), self._experts)


@contextmanager
def record_router(model: nn.Module) -> Iterator[RecordedChoices]:
    """Within it, note the experts that each token of ``model``'s forwards goes to; not those that backward repeats.

    Of a generation that is a rollout's if rows stay in their places: by sampling or greedily, not by beams.

    Args:
        model: a transformers model, bound or not, or a wrapper around one.

    Raises:
        RouterReplayError: a layer's router is not proven; the message says which, and why.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4, "vocab_size": 64}
        >>> model = MixtralForCausalLM(MixtralConfig(**shape, **heads))
        >>> ids = torch.tensor([[5, 9, 17]])
        >>> with record_router(model) as recorded:
        ...     logits = model(ids).logits
        >>> recorded.choices.indices.shape
        torch.Size([1, 3, 2, 2])
        >>> with router_replay(model, recorded.choices):
        ...     assert model(ids).logits.equal(logits)
    """
    routers = proven_routers(model)
    recorded = RecordedChoices([router.chooser.experts for router in routers])
    with WatchedRouters(model, routers, "router recording") as watched:
        watched.record(recorded)
        yield recorded


@contextmanager
def router_replay(model: nn.Module, choices: RouterChoices) -> Iterator[None]:
    """Within it, forwards of ``model`` send tokens to the experts of ``choices``, whose weights get the gradients.

    Every forward in it is of the batch that ``choices`` is of: ``[B, T]`` tokens. Routers weigh the experts by their
    own code, and where ``choices`` has -1 they choose as they do without, bit for bit. Afterwards the model is as it
    was before. Within another replay, this one's choices count.

    Args:
        model: a transformers model, bound or not, or a wrapper around one.
        choices: what :func:`record_router` noted, of this model or of one with the same routers.

    Raises:
        RouterReplayError: a router is not proven; choices are of another number of layers, of experts, or of experts
            per token, beyond them, or of one twice; a forward is of another shape; or backward, which runs
            checkpointed layers again, comes after it.
    """
    with WatchedRouters(model, proven_routers(model), "router replay") as watched:
        watched.replay(choices)
        yield


@dataclass(frozen=True)
class Router:
    block: str
    chooser: Chooser

    @property
    def path(self) -> str:
        return f"{self.block}.{self.chooser.name}"


_PROOFS: WeakKeyDictionary[nn.Module, ProvenOnce[tuple[Chooser | None, str]]] = WeakKeyDictionary()


def proven_routers(model: nn.Module) -> tuple[Router, ...]:
    """The routers of ``model``, in its layers' order.

    Raises:
        RouterReplayError: it has none, or one is not proven.
    """
    proofs, readings, found = _PROOFS.setdefault(model, ProvenOnce()), Readings(), []
    for path, block in named_modules(model):
        if not experts_of(block):
            continue
        chooser, why_not = proofs.of(probe.behaviour(block), lambda block=block: prove_router(block, readings))  # type: ignore[misc]
        if chooser is None:
            raise RouterReplayError(f"{path} ({type(block).__name__}): its choices can't be replayed, since {why_not}")
        found.append(Router(path, chooser))
    if not found:
        raise RouterReplayError(f"{type(model).__name__} has no layer in which a router chooses among experts")
    return tuple(found)


class WatchedRouters(Transformation):
    """Routers that choose within :class:`Forced`: given what ``takes`` says, and telling ``gives`` what they chose."""

    name = "router replay"

    def __init__(self, model: nn.Module, routers: Sequence[Router], name: str) -> None:
        super().__init__(model)
        self._what, self._routers, self._shapes = name, routers, [torch.Size()] * len(routers)
        self.leave()
        self.apply(self._made(model, routers))

    def leave(self) -> None:
        """From now on routers choose by themselves."""
        self._takes: Callable[[int, torch.Size, torch.device], Tensor | None] | None = None
        self._gives: Callable[[int, torch.Size, Tensor], None] = lambda layer, shape, indices: None
        self._needs_backward_inside = False

    def undo(self) -> None:
        """Leave first: a copy of the model has these routers too, and so has a model whose undoing is refused."""
        self.leave()
        super().undo()

    def record(self, recorded: RecordedChoices) -> None:
        """From now on routers choose by themselves, and it is noted in ``recorded``."""
        self.leave()
        self._takes = lambda layer, shape, device: None
        self._gives = lambda layer, shape, indices: recorded.add(layer, indices.reshape(*shape, -1))

    def replay(self, choices: RouterChoices) -> None:
        """From now on forwards are of the batch of ``choices``."""
        indices = _fitting(self._routers, choices)
        self.leave()
        self._needs_backward_inside = _refuse_reentrant(self.model)
        kept: dict[tuple[int, torch.device], Tensor] = {}

        def takes(layer: int, shape: torch.Size, device: torch.device) -> Tensor:
            if shape != indices.shape[:2]:
                raise RouterReplayError(
                    f"choices are of {list(indices.shape[:2])} tokens, and this forward is of {list(shape)}: "
                    "choices.packed(mask) and .padded(mask) lay them out as another batch"
                )
            if (layer, device) not in kept:
                kept[layer, device] = indices[:, :, layer].to(device, torch.int64).flatten(0, 1)
            return kept[layer, device]

        self._takes = takes

    def describe(self) -> str:
        return f"{self._what} of {len(self._shapes)} layers"

    def _made(self, model: nn.Module, routers: Sequence[Router]) -> Iterator[tuple[str, str, Change]]:
        for layer, router in enumerate(routers):
            block, inner = (model.get_submodule(path) for path in (router.block, router.path))
            yield router.block, self.name, ForwardChange(block, self._around_block(current_forward(block), layer))
            yield router.path, self.name, ForwardChange(inner, self._around(current_forward(inner), layer, router))

    def _around_block(self, original: Callable[..., Any], layer: int) -> Callable[..., Any]:
        @wraps(original)
        def forward(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            shape = hidden_states.shape[:-1]
            self._shapes[layer] = shape if len(shape) == 2 else torch.Size((1, *shape))
            return original(module, hidden_states, *args, **kwargs)

        return forward

    def _around(self, original: Callable[..., Any], layer: int, router: Router) -> Callable[..., Any]:
        chooser = router.chooser

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph would keep what it was traced with
        @wraps(original)
        def forward(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._takes is None:
                return original(module, hidden_states, *args, **kwargs)
            shape = self._shapes[layer]
            mode = Forced(self._takes(layer, shape, hidden_states.device), chooser.number, chooser.calls)
            with mode:
                result = original(module, hidden_states, *args, **kwargs)
            [indices] = [each for each in indices_in(result) if each.dim() == 2]
            if mode.taken < shape.numel():
                raise RouterReplayError(
                    f"{router.path} chose by no call of topk for {shape.numel() - mode.taken} of {shape.numel()} tokens"
                )
            if torch._C._current_graph_task_id() == -1:  # not a forward that backward repeats
                self._gives(layer, shape, indices)
            if self._needs_backward_inside:
                self._hold(result)
            return result

        return forward

    def _hold(self, result: Any) -> None:
        takes = self._takes

        def refuse(gradient: Tensor) -> None:
            if not self.active or self._takes is not takes:
                raise RouterReplayError(
                    "backward came after the replay of its forward had ended, or another forward had begun, and runs "
                    "checkpointed layers again, whose routers would choose otherwise: call backward within it, before "
                    "the next forward"
                )

        for each in result:
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(refuse)


def _fitting(routers: Sequence[Router], choices: RouterChoices) -> Tensor:
    """The indices of ``choices``, of signed numbers, if they fit."""
    if not isinstance(choices, RouterChoices):
        raise RouterReplayError(f"choices are a {type(choices).__name__}, expected RouterChoices, as recorded.choices")
    indices, experts = choices.indices, tuple(router.chooser.experts for router in routers)
    why_not = ""
    if indices.dim() != 4 or indices.dtype == torch.bool or indices.is_floating_point() or indices.is_complex():
        why_not = f"choices are {indices.dtype} {list(indices.shape)}, expected whole numbers [B, T, L, K]"
    elif indices.shape[2] != len(routers):
        why_not = f"choices are of {indices.shape[2]} layers, and the model has {len(routers)} with routers"
    elif tuple(choices.experts) != experts:
        why_not = f"choices are among {list(choices.experts)} experts by layer, and the model has {list(experts)}"
    elif wrong := [router for router in routers if router.chooser.top_k != indices.shape[3]]:
        why_not = (
            f"choices are of {indices.shape[3]} experts per token, and {wrong[0].path} takes {wrong[0].chooser.top_k}"
        )
    elif indices.numel():
        indices = indices if indices.dtype.is_signed else indices.to(torch.int64)
        limits = torch.tensor(experts, device=indices.device)[:, None]
        own = indices == OWN
        beyond = (indices < OWN) | (indices >= limits)
        twice = torch.zeros_like(own)
        for shift in range(1, indices.shape[3]):
            twice |= indices == indices.roll(shift, -1)
        if bool(beyond.any()):
            b, t, layer, k = beyond.nonzero()[0].tolist()
            expert = int(indices[b, t, layer, k])
            why_not = f"position [{b}, {t}] has expert {expert} in layer {layer}, which has {experts[layer]}"
        elif bool((own.any(-1) != own.all(-1)).any()):
            why_not = (
                f"a position has {OWN} beside experts: a router chooses all of a token's experts by itself, or none"
            )
        elif bool((twice & ~own).any()):
            b, t, layer, k = (twice & ~own).nonzero()[0].tolist()
            why_not = (
                f"position [{b}, {t}] has expert {int(indices[b, t, layer, k])} twice in layer {layer}: no router does "
                f"so. Give {OWN} where nothing was recorded, as at padding"
            )
    if why_not:
        raise RouterReplayError(f"these choices can't be replayed: {why_not}")
    return indices


def _refuse_reentrant(model: nn.Module) -> bool:
    """Whether layers are checkpointed. In reentrant ones nothing could tell a backward that comes too late."""
    layers = [each for each in model.modules() if getattr(each, "gradient_checkpointing", False)]
    functions = [getattr(each, "_gradient_checkpointing_func", None) for each in layers]
    functions += [each.checkpoint_fn for each in model.modules() if isinstance(each, CheckpointWrapper)]
    for function in functions:
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise RouterReplayError("router_replay needs gradient_checkpointing_kwargs={'use_reentrant': False}")
    return bool(functions)
