"""What a model hands to its attention functions: seen by running its forward on zeros, under each mask interface.

The copy that runs has the model's code and sizes, no memory (:mod:`veomni_core.sites.hollow_twin`), and configs of its
own. In place of transformers' table of attention functions its modules see a recorder, so nothing is registered.
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

from veomni_core.sites import probe
from veomni_core.sites.config_changes import OwnConfigs, select_interface
from veomni_core.sites.functions import current_forward, global_functions, with_globals
from veomni_core.sites.hollow_twin import BATCH, LENGTH, ZERO, hollow_twin
from veomni_core.sites.repeated_layers import skip_repeated_layers
from veomni_core.sites.weightless import run_on_meta

Function = Callable[..., Any]
TABLE = "ALL_ATTENTION_FUNCTIONS"
_EAGER_FUNCTION = "eager_attention_forward"
_DECODER_LENGTH = 7  # another than the encoder's, so that attention across them is told apart
_PATCHES = 32  # of an image's side: Pixtral's 96 by 96 would take masks of 18432 by 18432
WINDOW = 4  # shorter than LENGTH, so that a sliding window is seen


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
    """The calls of one run of the model, which modules it reached, and what ended it early, where something did."""

    padding: Tensor | None
    calls: list[AttentionCall] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    why_it_ended: str = ""


class TracedModel:
    """A copy of ``model`` that can be run under any interface; to be used within :func:`probe.seeded`."""

    def __init__(self, model: nn.Module, readers: Collection[str]) -> None:
        self._twin = hollow_twin(model).eval()
        self._trace = Trace(None)
        self._ran_for_eager: dict[tuple[str, bool, bool], frozenset[str]] = {}
        for module in self._twin.modules():  # what a forward may keep in lists and mappings is the copy's
            vars(module).update({n: copy.copy(v) for n, v in vars(module).items() if type(v) in (list, dict, set)})
        OwnConfigs(self._twin).apply()
        _narrow_windows(self._twin)
        for config in _configs(self._twin):
            if "output_router_logits" in vars(config):  # for the loss alone
                vars(config)["output_router_logits"] = False
        for path in readers:
            module = self._twin.get_submodule(path)
            vars(module)["forward"] = MethodType(self._recording(path, current_forward(module)), module)
        run_on_meta(self._twin, readers)
        self._repeated = skip_repeated_layers(self._twin, self._reached_within)

    def run(self, path: str, interface: str, padded: bool, crossing: bool = False) -> Trace:
        """Run the module at ``path`` under the mask ``interface`` of transformers, with padding or not; eager first.

        ``crossing`` gives a decoder on its own an encoder's hidden states, too.
        """
        module: Any = self._twin.get_submodule(path)
        for config in _configs(self._twin):
            _, why_not = probe.attempt(partial(select_interface, config, interface))
            if why_not:  # in transformers 5.2 gpt-oss's config raises at all but one FlashAttention
                return Trace(None, why_it_ended=why_not)
        inputs, why_not = probe.attempt(lambda: _inputs(module, padded, crossing))
        if why_not:  # a model that nothing says how to call: an attention module on its own
            return Trace(None, why_it_ended=why_not)
        run = (path, padded, crossing)
        trace = self._call(module, inputs, run)
        if trace.why_it_ended and "pixel_values" in inputs:  # it takes no other image than its config says
            height, width = _image_size(module.config)
            trace = self._call(module, {**inputs, "pixel_values": _image(module.config, height, width)}, run)
        self._ran_for_eager.setdefault(run, self._repeated.ran)
        return trace

    def _call(self, module: Any, inputs: dict[str, Any], run: tuple[str, bool, bool]) -> Trace:
        trace = self._trace = Trace(inputs.get("attention_mask"))
        # The layers that ran for eager: other masks may tell fewer layers apart, and calls are compared one by one.
        self._repeated.begin_run(self._ran_for_eager.get(run, frozenset()))
        with torch.no_grad():
            _, trace.why_it_ended = probe.attempt(lambda: module(**inputs))
        return trace

    def _recording(self, path: str, forward: Function) -> Function:
        functions = {name: value for name, value in global_functions(forward) if name.endswith(_EAGER_FUNCTION)}
        recorders = {name: _Recorder(self, path, function) for name, function in functions.items()}
        return with_globals(forward, {TABLE: _RecordingTable(self, path), **recorders})

    def _reached_within(self, layer: str) -> None:
        """A repeated layer was left out, as an earlier one was given the same."""
        self._trace.reached.add(layer)

    def record(self, call: AttentionCall) -> None:
        """Called by the recorders."""
        self._trace.calls.append(call)
        self._trace.reached.add(call.path)


class _Recorder:
    """Stands in for an attention function."""

    def __init__(self, model: TracedModel, path: str, eager: Function | None) -> None:
        self._model, self._path, self.eager = model, path, eager

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *rest: Any, **kw: Any
    ) -> tuple[Tensor, None]:
        if rest:
            raise TypeError(f"its attention function is given {len(rest)} more arguments by position")
        heads = (query, key, value)
        self._model.record(AttentionCall(self._path, module, self.eager, heads, attention_mask, kw))
        batch, count, length, _ = query.shape
        return ZERO.expand(batch, length, count, value.shape[-1]), None


class _RecordingTable:
    """Stands in for transformers' table of attention functions."""

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
    """Token ids, or what the model names as its main input, in the shapes that its config tells."""
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
    kinds = {parameter.kind for parameter in inspect.signature(type(module).forward).parameters.values()}
    return "use_cache" in vars(module.config) and inspect.Parameter.VAR_KEYWORD in kinds


def _image(config: Any, height: int, width: int) -> Tensor:
    return ZERO.expand(BATCH, getattr(config, "num_channels", 3), height, width)


def _image_size(config: Any) -> tuple[int, int]:
    return _pair(config.image_size)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]


def _tokens(config: Any, length: int) -> Tensor:
    """Ids that no config gives a meaning to, as far as the vocabulary has such."""
    configs = [config, config.get_text_config()]
    vocabulary = configs[-1].vocab_size
    special = {v for each in configs for name, v in vars(each).items() if "token" in name and isinstance(v, int)}
    plain = [identity for identity in range(min(vocabulary, 512)) if identity not in special] or [0]
    return torch.tensor(plain)[torch.randint(len(plain), (BATCH, length))]


def _configs(twin: nn.Module) -> list[Any]:
    return list({id(m.config): m.config for m in twin.modules() if "config" in vars(m)}.values())


def _narrow_windows(twin: nn.Module) -> None:
    """Sliding windows that every module takes from its config as they are become shorter than the sequence."""
    holders = [module for module in twin.modules() if isinstance(vars(module).get("sliding_window"), int)]
    stated = [config for config in _configs(twin) if isinstance(vars(config).get("sliding_window"), int)]
    windows = {vars(config)["sliding_window"] for config in stated}
    if all(vars(module)["sliding_window"] in windows for module in holders):
        for each in (*holders, *stated):
            vars(each)["sliding_window"] = WINDOW


def roots(model: nn.Module, readers: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Modules to be run: the model, alone and across, and the outermost one of each further config that is read."""
    yield "", False
    if "encoder_hidden_states" in inspect.signature(type(model).forward).parameters:
        yield "", True
    wanted = {id(model.get_submodule(path).config) for path in readers}
    for path, module in model.named_modules():
        identity = id(vars(module).get("config"))
        if identity in wanted and hasattr(type(module), "main_input_name"):
            wanted.discard(identity)
            if path:
                yield path, False
