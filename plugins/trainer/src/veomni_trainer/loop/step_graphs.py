"""Runs forward and backward as a CUDA graph: one launch in place of one from Python for each kernel.

A graph repeats the same kernels on the same addresses. So inputs are copied to where they were when it was captured,
and results are copied before they are handed on. Gradients stay where the graph writes them.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.errors import ConfigError
from veomni_trainer.loop.length_masks import LengthMasks, Masks

Inputs = Mapping[str, Any]
Results = Mapping[str, Tensor]
Step = Callable[[dict[str, Any]], Results]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], Results]], tuple[Replay, Results]]
# Steps of a form before it is captured: kernels are compiled in the first, and a library may try several of them.
_EAGER_STEPS = 3
# Sequences of one length have one form, and perhaps another one at an epoch's end.
_MOST_FORMS = 8
# Of such inputs no value says where a sequence begins or ends.
_OF_WHOLE_SEQUENCES = {"input_ids", "labels", "num_items_in_batch"}
_PLAIN = (bool, int, float, str, type(None))
_INSTEAD = "or write cuda_graphs: false"
_NO_KERNELS = ("veomni_core.", "veomni_trainer.")


@dataclass(frozen=True)
class _Graph:
    """A captured step: where it reads its inputs, and where it writes its results and gradients."""

    replay: Replay
    inputs: Inputs
    results: Results
    gradients: Mapping[nn.Parameter, Tensor]


class StepGraphs:
    """Forward and backward of a model as graphs, one for each form of inputs: their names, shapes and dtypes.

    The first three steps of a form run as without graphs.

    Args:
        model: what the steps train.
        accumulates: whether a step may add to the gradients of the step before. Then they have memory of their own,
            which is filled with zeros where a sum begins. Otherwise a graph's gradients are what it has computed.
        repeats_forwards: whether the backward computes forwards again. It could not draw the same random numbers
            again, so the model may draw none.
        capture: records a function without computing it; gives what replays it, and the results that this fills.
        random_state: of the device, to be compared.
    """

    def __init__(
        self,
        model: nn.Module,
        accumulates: bool,
        repeats_forwards: bool,
        capture: Capture,
        random_state: Callable[[], Tensor],
    ) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._accumulates, self._repeats_forwards = accumulates, repeats_forwards
        self._capture, self._random_state = capture, random_state
        self._length_masks = LengthMasks(model)
        self._masks: dict[Hashable, Masks] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        self._eager_steps: Counter[Hashable] = Counter()
        self._sums: dict[nn.Parameter, Tensor] = {}  # the gradients' own memory, where steps add to them

    def __call__(self, step: Step, inputs: Inputs) -> Results:
        """What ``step`` gives for ``inputs``; its backward leaves the parameters' gradients.

        Raises:
            ConfigError: the step can't be captured, its inputs have ever other shapes, or the model draws random
                numbers that the backward can't draw again.
        """
        form = tuple((name, *_form(name, value)) for name, value in inputs.items())
        if form not in self._graphs:
            if self._eager_steps[form] < _EAGER_STEPS:
                return self._run_eagerly(step, inputs, form)
            self._graphs[form] = self._captured(step, inputs, form)
        graph = self._graphs[form]
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                graph.inputs[name].copy_(value)
        if self._accumulates:
            _take_over(graph.gradients)
        graph.replay()
        for parameter, gradient in graph.gradients.items():
            parameter.grad = gradient
        return {name: value.clone() for name, value in graph.results.items()}

    def _run_eagerly(self, step: Step, inputs: Inputs, form: Hashable) -> Results:
        self._eager_steps[form] += 1
        if len(self._eager_steps) > _MOST_FORMS:
            raise ConfigError(
                f"train.cuda_graphs: the inputs have had {len(self._eager_steps)} forms, the last one {form}, and each "
                f"needs a graph of its own; train on sequences of one length, {_INSTEAD}"
            )
        before = self._random_state()
        with self._keeping_masks(inputs, form):
            found = self._accumulated(step, inputs) if self._accumulates else step(dict(inputs))
        if self._repeats_forwards and not torch.equal(before, self._random_state()):
            raise ConfigError(
                "train.cuda_graphs: the model draws random numbers, as for dropout. With gradient_checkpointing the "
                f"backward of a graph would draw others; set the model's dropout to 0, {_INSTEAD}"
            )
        return found

    def _accumulated(self, step: Step, inputs: Inputs) -> Results:
        """A step whose gradients are added to those there are; every step must have them of the same parameters."""
        before = {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}
        for parameter in before:
            parameter.grad = None
        found = step(dict(inputs))
        gradients = {each: each.grad for each in self._parameters if each.grad is not None}
        self._sums = self._sums or {each: torch.zeros_like(gradient) for each, gradient in gradients.items()}
        if gradients.keys() != self._sums.keys():
            raise ConfigError(f"train.cuda_graphs: some parameters have gradients in some steps alone; {_INSTEAD[3:]}")
        for parameter, gradient in before.items():
            parameter.grad = gradient.add_(gradients[parameter])
        return found

    def _keeping_masks(self, inputs: Inputs, form: Hashable) -> AbstractContextManager[None]:
        if inputs.keys() <= _OF_WHOLE_SEQUENCES:
            return self._length_masks.kept(self._masks.setdefault(form, []))
        return nullcontext()

    def _captured(self, step: Step, inputs: Inputs, form: Hashable) -> _Graph:
        held = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        before = {parameter: parameter.grad for parameter in self._parameters}
        for parameter in self._parameters:
            parameter.grad = self._sums.get(parameter)
        with self._length_masks.given(self._masks[form]) if form in self._masks else nullcontext():
            replay, results = self._capture(partial(step, dict(held)))
        gradients = {each: each.grad for each in self._parameters if each.grad is not None}
        for parameter, gradient in before.items():
            parameter.grad = gradient
        return _Graph(replay, held, results, gradients)


def graphs_on(device: torch.device, model: nn.Module, accumulates: bool, repeats_forwards: bool) -> StepGraphs:
    """Graphs of ``model``'s steps on a CUDA ``device``; all share one pool of memory, since one runs at a time."""
    capture = partial(_capture, torch.cuda.graph_pool_handle())
    random_state = partial(torch.cuda.get_rng_state, device)
    return StepGraphs(model, accumulates, repeats_forwards, capture, random_state)


def _capture(pool: Any, call: Callable[[], Results]) -> tuple[Replay, Results]:
    graph = torch.cuda.CUDAGraph()
    torch.clear_autocast_cache()  # a weight that was cast before would stay in the graph as it was
    try:
        # Other threads may use the GPU meanwhile: the data loader's pins memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConfigError(why_not_captured(error)) from error
    return graph.replay, results


def why_not_captured(error: BaseException) -> str:
    """What to say of ``error``, which ended a capture: where a kernel, or else a model, did what a graph can't repeat.

    Leaving the capture fails too after that, so the first of the errors says it.
    """
    while error.__context__ is not None:
        error = error.__context__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" for frame in frames]
    ours = [name for name in names if name.startswith("veomni_") and not name.startswith(_NO_KERNELS)]
    theirs = [name for name in names if name.startswith("transformers.models.")]
    where = (ours or theirs or names)[-1]
    return (
        f"train.cuda_graphs: {where} waits for the GPU, or does something else that a graph can't repeat: "
        f"{str(error).splitlines()[0]}. Name another kernel for its op in model.ops_implementation, {_INSTEAD}"
    )


def _take_over(gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """Fill ``gradients`` with what the parameters have: with zeros, where a sum begins."""
    if new := [gradient for parameter, gradient in gradients.items() if parameter.grad is None]:
        torch._foreach_zero_(new)
    for parameter, gradient in gradients.items():
        if parameter.grad is not None and parameter.grad is not gradient:
            gradient.copy_(parameter.grad)


def _form(name: str, value: Any) -> tuple[Hashable, ...]:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, _PLAIN):
        return (value,)
    raise ConfigError(
        f"train.cuda_graphs: the model is given {name}, a {type(value).__name__}, which a graph can't be given anew; "
        f"leave it out, {_INSTEAD}"
    )
