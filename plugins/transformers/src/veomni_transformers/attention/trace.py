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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.sites.walk import named_modules
from veomni_transformers.attention.config_changes import OwnConfigs, select_interface
from veomni_transformers.attention.module_values import ModuleRun
from veomni_transformers.attention.repeated_layers import skip_repeated_layers
from veomni_transformers.attention.tower_inputs import PICTURES, tower_inputs
from veomni_transformers.attention.weightless import run_on_meta
from veomni_transformers.attention.word_inputs import CROSSED, word_inputs
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals
from veomni_transformers.proving.hollow_twin import ZERO, LinearsOfZeros, hollow_twin

Function = Callable[..., Any]
TABLE = "ALL_ATTENTION_FUNCTIONS"
_EAGER_FUNCTION = "eager_attention_forward"
_FEATURES = ("get_image_features", "get_video_features", "get_audio_features")
_MASKS = "transformers.masking_utils"
NOTHING_FITS = "nothing says how to call it"
_MOST_FORMS = 60  # of inputs that are tried on one part of a model
WINDOW = 4  # shorter than LENGTH, so that a sliding window hides keys


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function by ``module``; ``eager`` is the function that eager attention would run.

    ``run`` is the place of the module's run among the trace's :attr:`Trace.modules`.
    """

    path: str
    module: nn.Module
    eager: Function | None
    heads: tuple[Tensor, Tensor, Tensor]
    mask: Any
    options: Mapping[str, Any]
    run: int = 0


@dataclass
class Trace:
    """One run of the model: its attention calls, the modules that it reached, and the error that ended it, if any.

    ``modules`` are the runs of attention modules; ``of_tower`` is whether the model was given no words.
    """

    padding: Tensor | None
    of_tower: bool = False
    calls: list[AttentionCall] = field(default_factory=list)
    modules: list[ModuleRun] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    why_it_ended: str = ""

    def of(self, paths: Collection[str]) -> Trace:
        """This run, with the runs and calls of the modules at ``paths`` alone."""
        kept = {run: place for place, run in enumerate(n for n, each in enumerate(self.modules) if each.path in paths)}
        calls = [replace(call, run=kept[call.run]) for call in self.calls if call.run in kept]
        return replace(self, calls=calls, modules=[self.modules[run] for run in kept])


class TracedModel:
    """A copy of ``model`` that can be run under any interface; to be used within :func:`probe.seeded`."""

    def __init__(self, model: nn.Module, readers: Collection[str]) -> None:
        self._twin = hollow_twin(model).eval()
        self._trace = Trace(None)
        self._numbers = probe.OwnNumbersWhileDrawn()
        self._ran_for_eager: dict[tuple[Root, bool], tuple[dict[str, Any], frozenset[str]]] = {}
        self.interface = EAGER
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

    def run(self, root: Root, interface: str, padded: bool) -> Trace:
        """Run ``root`` under transformers' mask ``interface``, with or without padding. ``eager`` must be run first."""
        module: Any = self._twin.get_submodule(root.path)
        for config in _configs(self._twin):
            _, why_not = probe.attempt(partial(select_interface, config, interface))
            if why_not:  # in transformers 5.2 gpt-oss's config raises for every FlashAttention but one
                return Trace(None, why_it_ended=why_not)
        known = self._ran_for_eager.get((root, padded))
        if known is not None:
            inputs, ran = known
            return self._call(module, root, inputs, ran, interface)
        best = Trace(None, why_it_ended=NOTHING_FITS, of_tower=not root.of_words)
        for inputs in islice(_forms(module, root, padded), _MOST_FORMS):
            trace = self._call(module, root, inputs, frozenset(), interface)
            complete = bool(trace.calls) and not trace.why_it_ended
            if complete or not best.calls or len(trace.reached) > len(best.reached):
                best = trace
                self._ran_for_eager[root, padded] = inputs, self._repeated.ran
            if complete:
                break
        return best

    def _call(self, module: Any, root: Root, inputs: dict[str, Any], ran: frozenset[str], interface: str) -> Trace:
        padding = inputs.get("attention_mask")
        trace = self._trace = Trace(padding, of_tower=not root.of_words)
        self.interface = interface
        # Run the layers that ran for eager. With other masks more layers may look repeated, but the calls of both runs
        # are compared one by one.
        self._repeated.begin_run(ran)
        with torch.no_grad(), self._numbers.run(), LinearsOfZeros():
            _, trace.why_it_ended = probe.attempt(lambda: getattr(module, root.method)(**inputs))
        return trace

    def _recording(self, path: str, forward: Function) -> Function:
        functions = {name: value for name, value in global_functions(forward) if name.endswith(_EAGER_FUNCTION)}
        recorders = {name: _Recorder(self, path, function) for name, function in functions.items()}
        run = with_globals(forward, {TABLE: _RecordingTable(self, path), **recorders})

        def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._trace.modules.append(ModuleRun(path, self.interface, args, kwargs))
            return run(module, *args, **kwargs)

        return recorded

    def _reached_within(self, layer: str) -> None:
        """Called with each repeated layer that is skipped: its attention counts as reached."""
        self._trace.reached.add(layer)

    def record(self, call: AttentionCall) -> None:
        """Called by the recorders."""
        self._trace.calls.append(replace(call, run=len(self._trace.modules) - 1))
        query, key, _ = call.heads
        self._trace.modules[-1].scores.append(query.shape[:3].numel() * key.shape[2])
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
        if self._model.interface == EAGER and not _is_dense(attention_mask, query, key):
            raise TypeError(
                f"its eager attention is given a mask {tuple(attention_mask.shape)} of {attention_mask.dtype}"
            )
        heads = (query, key, value)
        self._model.record(AttentionCall(self._path, module, self.eager, heads, attention_mask, kw))
        batch, count, length, _ = query.shape
        return ZERO.expand(batch, length, count, value.shape[-1]), None


def _is_dense(mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    if mask is None:
        return True
    fits = mask.dim() == 4 and mask.shape[2] in (1, query.shape[2]) and mask.shape[3] in (1, key.shape[2])
    return fits and (mask.is_floating_point() or mask.dtype == torch.bool)


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


@dataclass(frozen=True)
class Root:
    """What is run: the forward of the module at ``path``, or another method of it.

    ``crossing`` also passes an encoder's hidden states, for cross-attention in a decoder that has no encoder, and
    ``beside`` pictures; ``of_words`` is whether it takes words, or numbers in their place.
    """

    path: str
    method: str = "forward"
    crossing: bool = False
    of_words: bool = True
    beside: bool = False


def _forms(module: Any, root: Root, padded: bool) -> Iterator[dict[str, Any]]:
    """The forms of inputs to try, the first one that runs to its end is the one."""
    if root.of_words:
        yield from word_inputs(module, padded, root.crossing, root.beside)
    else:
        yield from tower_inputs(module, getattr(type(module), root.method), padded)


def _configs(twin: nn.Module) -> list[Any]:
    configs = (m.config for _, m in named_modules(twin) if hasattr(vars(m).get("config"), "__dict__"))
    return list({id(config): config for config in configs}.values())


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


def roots(model: nn.Module, readers: Iterable[str]) -> Iterator[Root]:
    """What to run, in this order, until every attention was reached.

    First what takes words: the model, and the outermost model that holds each further config of attention. Then these
    without words, and the methods by which the model makes features of pictures and sounds. Then models with words and
    pictures, and last the parts that build their masks themselves, for where what is around them can't be run.
    """
    wanted = {id(model.get_submodule(path).config) for path in readers}
    models: list[str] = [""]
    others: list[str] = []
    for path, module in named_modules(model):
        identity = id(vars(module).get("config"))
        if path and identity in wanted:
            is_model = hasattr(type(module), "main_input_name")
            if is_model:
                wanted.discard(identity)
            if is_model or not any(f"{path}.".startswith(f"{each}.") for each in others):
                (models if is_model else others).append(path)
    for path in models:
        module = model.get_submodule(path)
        parameters = inspect.signature(type(module).forward).parameters
        main = getattr(module, "main_input_name", "input_ids")
        takes_words = "input_ids" in parameters or not path
        if takes_words or not main.startswith("pixel"):
            yield Root(path)
        if parameters.keys() & {*CROSSED}:
            yield Root(path, crossing=True)
        if not takes_words or main != "input_ids" or "query_embeds" in parameters:
            yield Root(path, of_words=False)
    yield from reversed(list(_features(model)))
    yield from (Root(path, of_words=False) for path in others if path not in readers)
    for path in models:
        if inspect.signature(type(model.get_submodule(path)).forward).parameters.keys() & {*PICTURES}:
            yield Root(path, beside=True)
    for path, module in named_modules(model):
        if path not in models and not isinstance(module, nn.ModuleList) and _builds_masks(module):
            yield Root(path, of_words=False)


def _builds_masks(module: nn.Module) -> bool:
    functions = (value for _, value in global_functions(current_forward(module)))
    return any(getattr(function, "__module__", "") == _MASKS for function in functions)


def _features(model: nn.Module) -> Iterator[Root]:
    """The methods that make features, each of the innermost module that has it."""
    having = [
        (path, name)
        for path, module in named_modules(model)
        for name in _FEATURES
        if callable(getattr(type(module), name, None))
    ]
    for path, name in having:
        if not any(
            name == other and inner != path and inner.startswith(f"{path}.".lstrip(".")) for inner, other in having
        ):
            yield Root(path, name, of_words=False)
