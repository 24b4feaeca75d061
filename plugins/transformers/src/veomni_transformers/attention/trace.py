"""Records what a model passes to its attention functions, by running its forward on zeros under each mask interface.

The whole model is run, because the model builds the masks: an attention's own forward does not show which one reaches
it. What runs is a copy with the model's code and sizes, no memory (:mod:`veomni_transformers.proving.hollow_twin`), and
its own configs. Its modules see a recorder in place of transformers' table of attention functions, so nothing is
registered.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.sites.walk import named_modules
from veomni_transformers.attention.config_changes import OwnConfigs, select_interface
from veomni_transformers.attention.repeated_layers import skip_repeated_layers
from veomni_transformers.attention.weightless import run_on_meta
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals
from veomni_transformers.proving.hollow_twin import BATCH, LENGTH, ZERO, LinearsOfZeros, hollow_twin

Function = Callable[..., Any]
TABLE = "ALL_ATTENTION_FUNCTIONS"
_EAGER_FUNCTION = "eager_attention_forward"
_DECODER_LENGTH = 7  # differs from the encoder's, so that cross-attention can be told apart
_PATCHES = 32  # the most patches along an image's side: Pixtral's 96 by 96 would need masks of 18432 by 18432
WINDOW = 4  # shorter than LENGTH, so that a sliding window hides keys


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function by ``module``; ``eager`` is the function that eager attention would run."""

    path: str
    module: nn.Module
    eager: Function | None
    heads: tuple[Tensor, Tensor, Tensor]
    mask: Any
    options: Mapping[str, Any]


@dataclass
class Trace:
    """One run of the model: its attention calls, the modules that it reached, and the error that ended it, if any."""

    padding: Tensor | None
    calls: list[AttentionCall] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    why_it_ended: str = ""


class TracedModel:
    """A copy of ``model`` that can be run under any interface; to be used within :func:`probe.seeded`."""

    def __init__(self, model: nn.Module, readers: Collection[str]) -> None:
        self._twin = hollow_twin(model).eval()
        self._trace = Trace(None)
        self._numbers = probe.OwnNumbersWhileDrawn()
        self._ran_for_eager: dict[tuple[str, bool, bool], frozenset[str]] = {}
        for _, module in named_modules(self._twin):  # a forward may write to lists and mappings: the copy has its own
            vars(module).update({n: copy.copy(v) for n, v in vars(module).items() if type(v) in (list, dict, set)})
        OwnConfigs(self._twin).apply()
        _narrow_windows(self._twin)
        for config in _configs(self._twin):
            if "output_router_logits" in vars(config):  # only the loss needs them
                vars(config)["output_router_logits"] = False
        for path in readers:
            module = self._twin.get_submodule(path)
            vars(module)["forward"] = MethodType(self._recording(path, current_forward(module)), module)
        run_on_meta(self._twin, readers)
        self._repeated = skip_repeated_layers(self._twin, self._reached_within)

    def run(self, path: str, interface: str, padded: bool, crossing: bool = False) -> Trace:
        """Run the module at ``path`` under transformers' mask ``interface``, with or without padding.

        ``eager`` must be run first. ``crossing`` also passes an encoder's hidden states, for cross-attention in a
        decoder that has no encoder.
        """
        module: Any = self._twin.get_submodule(path)
        for config in _configs(self._twin):
            _, why_not = probe.attempt(partial(select_interface, config, interface))
            if why_not:  # in transformers 5.2 gpt-oss's config raises for every FlashAttention but one
                return Trace(None, why_it_ended=why_not)
        inputs, why_not = probe.attempt(lambda: _inputs(module, padded, crossing))
        if why_not:  # nothing says how to call the model: for instance, it is an attention module on its own
            return Trace(None, why_it_ended=why_not)
        run = (path, padded, crossing)
        trace = self._call(module, inputs, run)
        if trace.why_it_ended and "pixel_values" in inputs:  # it may only take images of the size in its config
            height, width = _image_size(module.config)
            trace = self._call(module, {**inputs, "pixel_values": _image(module.config, height, width)}, run)
        self._ran_for_eager.setdefault(run, self._repeated.ran)
        return trace

    def _call(self, module: Any, inputs: dict[str, Any], run: tuple[str, bool, bool]) -> Trace:
        trace = self._trace = Trace(inputs.get("attention_mask"))
        # Run the layers that ran for eager. With other masks more layers may look repeated, but the calls of both runs
        # are compared one by one.
        self._repeated.begin_run(self._ran_for_eager.get(run, frozenset()))
        with torch.no_grad(), self._numbers.run(), LinearsOfZeros():
            _, trace.why_it_ended = probe.attempt(lambda: module(**inputs))
        return trace

    def _recording(self, path: str, forward: Function) -> Function:
        functions = {name: value for name, value in global_functions(forward) if name.endswith(_EAGER_FUNCTION)}
        recorders = {name: _Recorder(self, path, function) for name, function in functions.items()}
        return with_globals(forward, {TABLE: _RecordingTable(self, path), **recorders})

    def _reached_within(self, layer: str) -> None:
        """Called with each repeated layer that is skipped: its attention counts as reached."""
        self._trace.reached.add(layer)

    def record(self, call: AttentionCall) -> None:
        """Called by the recorders."""
        self._trace.calls.append(call)
        self._trace.reached.add(call.path)


class _Recorder:
    """Replaces an attention function: records the call, and returns zeros."""

    def __init__(self, model: TracedModel, path: str, eager: Function | None) -> None:
        self._model, self._path, self.eager = model, path, eager

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *rest: Any, **kw: Any
    ) -> tuple[Tensor, None]:
        if rest:
            raise TypeError(f"its attention function is given {len(rest)} positional arguments after the mask")
        heads = (query, key, value)
        self._model.record(AttentionCall(self._path, module, self.eager, heads, attention_mask, kw))
        batch, count, length, _ = query.shape
        return ZERO.expand(batch, length, count, value.shape[-1]), None


class _RecordingTable:
    """Replaces transformers' table of attention functions: every lookup gives a recorder."""

    def __init__(self, model: TracedModel, path: str) -> None:
        self._model, self._path = model, path

    def get_interface(self, name: str, default: Function) -> Function:
        eager = default.eager if isinstance(default, _Recorder) else default
        return _Recorder(self._model, self._path, eager)

    def __getitem__(self, name: str) -> Function:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return _Recorder(self._model, self._path, ALL_ATTENTION_FUNCTIONS.get(name))

    def __contains__(self, name: str) -> bool:
        return True

    get = get_interface


def _inputs(module: Any, padded: bool, crossing: bool) -> dict[str, Any]:
    """Token ids, or what the model names as its main input, in the shapes that its config gives."""
    parameters = inspect.signature(type(module).forward).parameters
    config = module.config
    known: dict[str, Any] = {"use_cache": False}
    main = getattr(module, "main_input_name", "input_ids")
    if main == "pixel_values":
        longest = _PATCHES * max(_pair(getattr(config, "patch_size", 1)))
        known["pixel_values"] = _image(config, *(min(side, longest) for side in _image_size(config)))
    elif "input_ids" in parameters:
        known["input_ids"] = _tokens(config, LENGTH)
        known["decoder_input_ids"] = _tokens(config, _DECODER_LENGTH)
        if padded:
            known["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
            known["attention_mask"][1, -3:] = 0
    elif "inputs_embeds" in parameters or "hidden_states" in parameters:
        name = "inputs_embeds" if "inputs_embeds" in parameters else "hidden_states"
        known[name] = ZERO.expand(BATCH, LENGTH, config.hidden_size)
    if crossing:
        known["encoder_hidden_states"] = ZERO.expand(BATCH, _DECODER_LENGTH, config.hidden_size)
    return {
        name: value for name, value in known.items() if name in parameters or (name == "use_cache" and _open(module))
    }


def _open(module: Any) -> bool:
    """Whether the forward takes ``use_cache`` among its ``**kwargs``."""
    kinds = {parameter.kind for parameter in inspect.signature(type(module).forward).parameters.values()}
    return "use_cache" in vars(module.config) and inspect.Parameter.VAR_KEYWORD in kinds


def _image(config: Any, height: int, width: int) -> Tensor:
    return ZERO.expand(BATCH, getattr(config, "num_channels", 3), height, width)


def _image_size(config: Any) -> tuple[int, int]:
    return _pair(config.image_size)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]


def _tokens(config: Any, length: int) -> Tensor:
    """Random token ids that are no special tokens of a config, if the vocabulary has any such ids."""
    configs = [config, config.get_text_config()]
    vocabulary = configs[-1].vocab_size
    special = {v for each in configs for name, v in vars(each).items() if "token" in name and isinstance(v, int)}
    plain = [identity for identity in range(min(vocabulary, 512)) if identity not in special] or [0]
    return torch.tensor(plain)[torch.randint(len(plain), (BATCH, length), generator=probe.generator())]


def _configs(twin: nn.Module) -> list[Any]:
    return list({id(m.config): m.config for _, m in named_modules(twin) if "config" in vars(m)}.values())


def _narrow_windows(twin: nn.Module) -> None:
    """Make sliding windows shorter than the traced sequence, so that they hide keys.

    Only where every module's window is the one in its config: a window that is computed from it stays as it is.
    """
    holders = [module for _, module in named_modules(twin) if isinstance(vars(module).get("sliding_window"), int)]
    stated = [config for config in _configs(twin) if isinstance(vars(config).get("sliding_window"), int)]
    windows = {vars(config)["sliding_window"] for config in stated}
    if all(vars(module)["sliding_window"] in windows for module in holders):
        for each in (*holders, *stated):
            vars(each)["sliding_window"] = WINDOW


def roots(model: nn.Module, readers: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """``(path, crossing)`` of each run: the model, and the outermost model that holds each further config of attention.

    ``crossing`` runs pass an encoder's hidden states, for models that take them.
    """
    yield "", False
    if "encoder_hidden_states" in inspect.signature(type(model).forward).parameters:
        yield "", True
    wanted = {id(model.get_submodule(path).config) for path in readers}
    for path, module in named_modules(model):
        identity = id(vars(module).get("config"))
        if identity in wanted and hasattr(type(module), "main_input_name"):
            wanted.discard(identity)
            if path:
                yield path, False
