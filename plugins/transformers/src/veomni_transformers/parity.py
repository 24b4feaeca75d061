"""Whether a model gives a token the same bits in training and rollouts: alone, in batches, padded, packed, decoded.

Each layout of the same tokens is compared with the training's forward, module by module, so that a difference is named
where it arises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from veomni_core.binding.binding import binding_of
from veomni_core.changes.bound_subclass import eager_class
from veomni_core.errors import ConfigError, VeOmniError
from veomni_core.kernels import IGNORED
from veomni_core.random_states import random_states_kept
from veomni_ops.token_logprobs import LOGPROBS
from veomni_transformers.attention.locator import readers_by_owner
from veomni_transformers.forwards.logprobs_head import score
from veomni_transformers.packed.module_outputs import after_each_module
from veomni_transformers.packed.prepared_masks import prepared_masks
from veomni_transformers.routers.proof import experts_of

_SEQUENCES, _LENGTH = 3, 70  # more keys than a block of attention's 64
_STEPS = 8  # of the batch's end; one sequence is decoded from its first token on
_PADDING, _LARGER = 5, 7  # positions of padding; how many times as many sequences the larger batch has
OWN, _ALONE = "transformers' own code", "one sequence token by token, with a cache"

Outputs = dict[tuple[str, int], Tensor]  # by module, and by the number in its tuple
Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Compared:
    """One layout's log-probabilities beside those of the training's forward.

    Attributes:
        layout: which layout.
        mean, largest: the differences; ``None`` where the layout can't be run.
        first: the first module whose output has other bits, and what runs there; empty if there is none.
        why_not: why it can't be run.
    """

    layout: str
    mean: float | None = None
    largest: float | None = None
    first: str = ""
    why_not: str = ""

    @property
    def same_bits(self) -> bool:
        """Whether no bit differs, of a log-probability or of any module's output."""
        return self.largest == 0.0 and not self.first


def check_parity(
    model: PreTrainedModel, input_ids: Tensor | None = None, own: PreTrainedModel | None = None
) -> tuple[Compared, ...]:
    """Compare log-probabilities of the same tokens, in every layout in which rollouts and training meet them.

    Args:
        model: a causal language model with weights, bound or not, that draws no random numbers.
        input_ids: tokens ``[B, T]``, at least two each way; without them, random ones.
        own: the same model, unbound, to compare with too.

    Returns:
        For each layout how far it is from the training's forward.

    Raises:
        ValueError: ``input_ids`` are too few, or no tokens of the model's; as a ConfigError, the training's forward
            draws random numbers or gives NaN, or the model is in a wrapper.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from veomni_core import bind
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> every = {name: "fixed_order" for name in ("linear_implementation", "token_logprobs_implementation")}
        >>> binding = bind(model, {"preset": "auto", "require": "batch_invariant", **every}, device="cpu")
        >>> [each.layout for each in check_parity(model) if not each.same_bits]
        []
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"expected a transformers model, not {type(model).__name__}: give what is in it, as PEFT's get_base_model()"
        )
    config = model.config.get_text_config()
    if input_ids is None:
        generator = torch.Generator().manual_seed(0)
        positions = getattr(config, "max_position_embeddings", None) or -1  # which XLNet has: there is no limit
        length = min(_LENGTH, positions - _PADDING) if positions > 0 else _LENGTH
        input_ids = torch.randint(config.vocab_size, (_SEQUENCES, length), generator=generator)
    ids = torch.as_tensor(input_ids, device=model.device)
    if ids.dim() != 2 or min(ids.shape) < 2 or ids.is_floating_point():
        raise ValueError(
            f"input_ids is {ids.dtype} {list(ids.shape)}; give whole numbers of at least two sequences of two tokens "
            "[B, T]"
        )
    first, last = int(ids.min()), int(ids.max())
    if first < 0 or last >= config.vocab_size:  # a GPU would be lost to the process
        raise ValueError(f"input_ids go from {first} to {last}, and the model's vocabulary has {config.vocab_size}")
    with random_states_kept():
        with _mode(model, True):
            before = _random_state(model.device)
            wanted = _run(model, _successors(ids), {"input_ids": ids})
            if not before.equal(_random_state(model.device)):
                raise ConfigError(
                    "the training's forward draws random numbers, as dropout does and routers' noise: no other forward "
                    "gives its bits. Set them to 0 in the model's config, as attention_dropout: 0.0"
                )
        if not bool(wanted[0].isfinite().all()):
            raise ConfigError(
                "the training's forward gives log-probabilities that are no finite numbers: they equal none, and no "
                "module could be named. Look for NaN among the weights"
            )
        with _mode(model, False), torch.no_grad():
            found = [_compared(model, name, wanted, run) for name, run in _layouts(model, ids)]
    if own is not None:
        with _mode(own, False), torch.no_grad(), random_states_kept():
            found.append(_compared(own, OWN, wanted, lambda: _run(own, _successors(ids), {"input_ids": ids})))
    return tuple(found)


_Run = tuple[Tensor, Outputs]  # log-probabilities [B, T], and by module [B, T, ...] outputs, and inputs from -1 down


def _layouts(model: PreTrainedModel, ids: Tensor) -> Iterator[tuple[str, Callable[[], _Run]]]:
    labels, (batch, length) = _successors(ids), ids.shape
    rows = list(zip(ids.split(1), labels.split(1), strict=True))
    yield "each sequence alone", lambda: _joined([_run(model, wanted, {"input_ids": row}) for row, wanted in rows], 0)
    many, theirs = ids.repeat(_LARGER, 1), labels.repeat(_LARGER, 1)
    yield f"in a batch of {len(many)}", lambda: _cut(_run(model, theirs, {"input_ids": many}), lambda x: x[-batch:])
    has_positions = "position_ids" in inspect.signature(model.forward).parameters
    for side, before in (("left", _PADDING), ("right", 0)):
        yield f"padded on the {side}", partial(_padded, model, ids, labels, before, has_positions)
    if has_positions:
        places = torch.arange(length, device=ids.device).repeat(batch)[None]
        flat = {"input_ids": ids.reshape(1, -1), "position_ids": places, **prepared_masks(model, places)}
        apart: Part = lambda x: x.reshape(batch, length, *x.shape[2:])  # noqa: E731
        yield "packed", lambda: _cut(_run(model, labels.reshape(1, -1), flat), apart)
    yield "the end token by token, with a cache", lambda: _decoded(model, ids, labels, max(length - _STEPS, 0))
    yield _ALONE, lambda: _decoded(model, ids[:1], labels[:1])


def _padded(model: PreTrainedModel, ids: Tensor, labels: Tensor, before: int, has_positions: bool) -> _Run:
    around = (before, _PADDING - before)
    mask = F.pad(torch.ones_like(ids), around)
    inputs = {"input_ids": F.pad(ids, around), "attention_mask": mask}
    if has_positions:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    whole = _run(model, F.pad(labels, around, value=IGNORED), inputs)
    return _cut(whole, lambda x: x[:, before : before + ids.shape[1]])


def _decoded(model: PreTrainedModel, ids: Tensor, labels: Tensor, first: int = 0) -> _Run:
    """The ``first`` tokens at once, and then one after the other."""
    cache, steps, sizes = None, [], [*([first] if first else []), *[1] * (ids.shape[1] - first)]
    name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
    for now, wanted in zip(ids.split(sizes, 1), labels.split(sizes, 1), strict=True):
        outputs: list[Any] = []
        steps.append(_run(model, wanted, {"input_ids": now, name: cache, "use_cache": True}, outputs))
        if (cache := outputs[0].get(name)) is None:
            raise ConfigError(f"its forward gives no {name}, with which to go on")
    return _joined(steps, 1)


def _run(model: PreTrainedModel, labels: Tensor, inputs: Mapping[str, Any], results: list[Any] | None = None) -> _Run:
    found: Outputs = {}
    batch, length = labels.shape
    paths = {module: path for path, module in model.named_modules()}
    # Indices count where they are a router's: those of keys are other ones in another layout.
    choosers = {each for block in paths if experts_of(block) for each in block.children()}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        given = ((~number, value) for number, value in enumerate(args))
        for number, value in (*given, *enumerate(output if isinstance(output, tuple) else (output,))):
            if type(value) is Tensor and value.dim() > 1 and (value.is_floating_point() or module in choosers):
                if value.shape[:2] == (batch, length):
                    found[paths[module], number] = value.detach()
                elif value.shape[0] == batch * length:  # as of experts
                    found[paths[module], number] = value.detach().unflatten(0, (batch, length))

    inputs = {"use_cache": False, **inputs}
    with after_each_module(model, record):
        scores = score(lambda: model(**inputs), labels, temperature=1.0, ignore_index=IGNORED, outputs=(LOGPROBS,))
    if results is not None:
        results.append(scores.output)
    return scores.results[0].detach(), found


def _successors(ids: Tensor) -> Tensor:
    return F.pad(ids[:, 1:], (0, 1), value=IGNORED)


def _cut(run: _Run, part: Part) -> _Run:
    return part(run[0]), {key: part(output) for key, output in run[1].items()}


def _joined(runs: list[_Run], dim: int) -> _Run:
    shapes = {key: output.movedim(dim, 0).shape[1:] for key, output in runs[0][1].items()}
    every = [{key: output.movedim(dim, 0).shape[1:] for key, output in outputs.items()} for _, outputs in runs]
    # What has another shape in some run, as a count of experts that is the batch's, has no row for each position.
    keys = [key for key, shape in shapes.items() if all(each.get(key) == shape for each in every)]
    outputs = {key: torch.cat([each[key] for _, each in runs], dim) for key in keys}
    return torch.cat([logprobs for logprobs, _ in runs], dim), outputs


def _compared(model: PreTrainedModel, layout: str, wanted: _Run, run: Callable[[], _Run]) -> Compared:
    try:
        logprobs, outputs = run()
    except VeOmniError as error:  # as of packed sequences that a model would mix
        return Compared(layout, why_not=str(error))
    except Exception as error:  # of the model's own code, as of a cache that it lacks
        return Compared(layout, why_not=f"{type(error).__name__}: {error}")
    rows = len(logprobs)  # one sequence, or all
    wanted = _cut(wanted, lambda x: x[:rows])
    difference = (logprobs.double() - wanted[0].double()).abs()
    both = [key for key, output in wanted[1].items() if key in outputs and outputs[key].shape == output.shape]
    other = [key for key in both if not torch.equal(outputs[key], wanted[1][key])]
    first = next((path for path, n in other if n >= 0), None)
    named = "" if first is None else _named_source(model, first, {path for path, n in other if n < 0})
    return Compared(layout, float(difference.mean()), float(difference.max()), named)


def _named_source(model: PreTrainedModel, first: str, given_other: Collection[str]) -> str:
    """Where ``first`` got other bits: in itself, or, as no module before it gave any, in the code that calls it."""
    path = first
    while path and path in given_other:
        path = path.rpartition(".")[0]
        while isinstance(model.get_submodule(path), (nn.ModuleList, nn.ModuleDict)):  # not called
            path = path.rpartition(".")[0]
    before = first.removeprefix(f"{path}.")
    return _named(model, path) + (f", before its {before}" if path != first else "")


def _named(model: PreTrainedModel, path: str) -> str:
    """The module, and what the plan has there: attention has its site at what holds the config that it reads."""
    binding, kind = binding_of(model), eager_class(type(model.get_submodule(path))).__name__
    read = [at for at, readers in readers_by_owner(model).items() if path in readers]
    kernels = [
        f"{d.site.op_name}:{d.kernel}"
        for d in (binding.plan.decisions if binding else ())
        if d.site.path == path or (d.site.path in read and d.site.op_name == "attention")
    ]
    return f"{path or 'the model'} ({', '.join([kind, *kernels])})"


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


@contextmanager
def _mode(model: PreTrainedModel, training: bool) -> Iterator[None]:
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
