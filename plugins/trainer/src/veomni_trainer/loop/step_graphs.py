"""Runs forward and backward as a CUDA graph: one launch in place of one from Python for each kernel.

A graph repeats the same kernels on the same addresses. So inputs are copied to where they were when it was captured,
and results are copied before they are handed on. Gradients stay where the graph writes them. Python runs at the capture
alone: what it decides there is decided for good.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.errors import ConfigError
from veomni_transformers.jobs.job_files import first_line
from veomni_transformers.packed.packed_sequences import mask_functions
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals

Inputs = Mapping[str, Tensor | None]
Results = Mapping[str, Tensor]
Step = Callable[[dict[str, Any]], Results]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], Results]], tuple[Replay, Results]]
Masks = list[Any]  # in the order in which a forward builds them; None is a mask too
Function = Callable[..., Any]
# Steps of a form before it is captured: kernels are compiled in the first, and a library may try several of them.
_EAGER_STEPS = 3
# Sequences of one length have one form, and perhaps another one at an epoch's end.
_MOST_FORMS = 8
# Of such inputs no value says where a sequence begins or ends, so the masks of a model depend on lengths alone.
_OF_WHOLE_SEQUENCES = {"input_ids", "labels", "num_items_in_batch"}
_WITHOUT = "write cuda_graphs: false"
# Packages whose code calls kernels, and is none.
_CALLERS = {
    "accelerate",
    "peft",
    "torch",
    "transformers",
    "triton",
    "veomni_core",
    "veomni_trainer",
    "veomni_transformers",
}


class LengthMasks:
    """Attention masks that depend on lengths alone, kept from one step for a step that is captured.

    Where nothing is padded or packed, transformers builds no mask, or one of the lengths. It looks at values to know
    that, for which it waits for the device. While a graph is captured it can't look, and would build a mask for any
    case, with which attention is slower. So a captured forward is given the masks of a forward before it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._functions = {module: names for module in model.modules() if (names := mask_functions(module))}

    @contextmanager
    def kept(self, masks: Masks) -> Iterator[None]:
        """Put what is built in this context into ``masks``."""

        def keeping(function: Function) -> Function:
            def build(*args: Any, **kwargs: Any) -> Any:
                masks.append(function(*args, **kwargs))
                return masks[-1]

            return build

        masks.clear()
        with self._replaced(keeping):
            yield

    @contextmanager
    def given(self, masks: Masks) -> Iterator[None]:
        """Give ``masks`` in this context, and build none."""
        left = iter(masks)
        with self._replaced(lambda function: lambda *args, **kwargs: next(left)):
            yield

    @contextmanager
    def _replaced(self, replacement: Callable[[Function], Function]) -> Iterator[None]:
        before = {module: vars(module).get("forward") for module in self._functions}
        try:
            for module, names in self._functions.items():
                forward = current_forward(module)
                functions = {name: replacement(value) for name, value in global_functions(forward) if name in names}
                module.forward = MethodType(with_globals(forward, functions), module)
            yield
        finally:
            for module, own in before.items():
                if own is None:
                    vars(module).pop("forward", None)
                else:
                    module.forward = own


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
        accumulates: whether a step may add to the gradients of the step before. Then all forms have the same memory
            for them, which is filled with zeros where a sum begins. Otherwise a graph's gradients are what it has
            computed.
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
        self._sums: dict[nn.Parameter, Tensor] = {}  # the gradients, where steps add to them

    def __call__(self, step: Step, inputs: Inputs) -> Results:
        """What ``step`` gives for ``inputs``; its backward leaves the parameters' gradients.

        Raises:
            ConfigError: the step can't be captured, or would not compute the same as a graph; the message says why.
        """
        form = _form(inputs)
        if form not in self._graphs:
            if self._eager_steps[form] < _EAGER_STEPS:
                return self._run_eagerly(step, inputs, form)
            self._graphs[form] = self._captured(step, inputs, form)
        graph = self._graphs[form]
        for name, value in inputs.items():
            if (held := graph.inputs[name]) is not None and value is not None:
                held.copy_(value)
        if self._accumulates:
            _take_over(graph.gradients)
        graph.replay()
        for parameter, gradient in graph.gradients.items():
            parameter.grad = gradient
        return {name: value.clone() for name, value in graph.results.items()}

    def _run_eagerly(self, step: Step, inputs: Inputs, form: Hashable) -> Results:
        self._eager_steps[form] += 1
        if len(self._eager_steps) > _MOST_FORMS:
            shapes = " and ".join(f"{name} {list(value.shape)}" for name, value in inputs.items() if value is not None)
            raise ConfigError(
                f"train.cuda_graphs: the inputs have had {len(self._eager_steps)} forms, the last one {shapes}, and "
                f"each needs a graph of its own; train on sequences of one length, or {_WITHOUT}"
            )
        host, device = _host_state(), self._random_state()
        with self._length_masks.kept(self._masks.setdefault(form, [])):
            found = self._added(step, inputs) if self._accumulates else step(dict(inputs))
        if host != _host_state():
            raise ConfigError(
                "train.cuda_graphs: the model draws random numbers on the CPU, as for skipped layers, and a graph "
                f"would repeat what they decided once; set the model's layerdrop to 0, or {_WITHOUT}"
            )
        if self._repeats_forwards and not torch.equal(device, self._random_state()):
            raise ConfigError(
                "train.cuda_graphs: the model draws random numbers, as for dropout. With gradient_checkpointing the "
                f"backward of a graph would draw others; set the model's dropout to 0, or {_WITHOUT}"
            )
        return found

    def _added(self, step: Step, inputs: Inputs) -> Results:
        """A step that adds to the sums, which the first step leaves; every step must have the same gradients."""
        if self._sums:
            _take_over(self._sums)
            for parameter, gradient in self._sums.items():
                parameter.grad = gradient
        before = {parameter: gradient._version for parameter, gradient in self._sums.items()}
        found = step(dict(inputs))
        gradients = {each: each.grad for each in self._parameters if each.grad is not None}
        self._sums = self._sums or gradients
        if gradients.keys() != self._sums.keys() or any(
            gradients[parameter]._version == version for parameter, version in before.items()
        ):
            raise ConfigError(f"train.cuda_graphs: some parameters have gradients in some steps alone; {_WITHOUT}")
        return found

    def _captured(self, step: Step, inputs: Inputs, form: Hashable) -> _Graph:
        held = {name: None if value is None else value.clone() for name, value in inputs.items()}
        before = {parameter: parameter.grad for parameter in self._parameters}
        try:
            for parameter in self._parameters:
                parameter.grad = self._sums.get(parameter)
            with self._length_masks.given(self._masks[form]):
                replay, results = self._capture(partial(step, dict(held)))
            gradients = {each: each.grad for each in self._parameters if each.grad is not None}
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient
        return _Graph(replay, held, results, gradients)


def graphs_on(device: torch.device, model: nn.Module, accumulates: bool, repeats_forwards: bool) -> StepGraphs:
    """Graphs of ``model``'s steps on a CUDA ``device``; all share one pool of memory, since one runs at a time."""
    capture = partial(_capture, torch.cuda.graph_pool_handle())
    random_state = partial(torch.cuda.get_rng_state, device)
    return StepGraphs(model, accumulates, repeats_forwards, capture, random_state)


def _capture(pool: Any, call: Callable[[], Results]) -> tuple[Replay, Results]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    raised: list[BaseException] = []
    torch.clear_autocast_cache()  # a weight that was cast before would stay in the graph as it was
    try:
        # Other threads may use the GPU meanwhile: the data loader's pins memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            try:
                results = call()
            except BaseException as error:
                raised.append(error)
                raise
    except BaseException as error:
        forget_failed_capture(stream)
        first = raised[0] if raised else error  # the end of a capture fails too after that
        if isinstance(first, torch.OutOfMemoryError) or not isinstance(first, RuntimeError):
            raise first from None
        raise ConfigError(why_not_captured(first)) from first
    return graph.replay, results


def forget_failed_capture(stream: torch.cuda.Stream) -> None:
    """Make a process usable again in which a capture has failed: torch 2.11 does not end it everywhere.

    Args:
        stream: the one that was current before.
    """
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # the error that ended the capture matters more
        for generator in torch.cuda.default_generators:  # they wait for its end, and draw nothing until then
            generator.graphsafe_set_state(generator.clone_state())


def why_not_captured(error: BaseException) -> str:
    """What to say of ``error``, which ended a capture: which kernel, or else model, did what a graph can't repeat."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" for frame in frames]
    kernels = [name for name in names if name.partition(".")[0] not in _CALLERS | sys.stdlib_module_names]
    models = [name for name in names if name.startswith("transformers.models.")]
    where = (kernels[:1] or models[-1:] or names[-1:] or ["something"])[0]
    return (
        f"train.cuda_graphs: {where} waits for the GPU, or does something else that a graph can't repeat: "
        f"{first_line(error)}. Name another kernel for its op in model.ops_implementation, or {_WITHOUT}"
    )


def _take_over(gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """Fill ``gradients`` with what the parameters have: with zeros, where a sum begins."""
    if new := [gradient for parameter, gradient in gradients.items() if parameter.grad is None]:
        torch._foreach_zero_(new)
    for parameter, gradient in gradients.items():
        if parameter.grad is not None and parameter.grad is not gradient:
            gradient.copy_(parameter.grad)


def _form(inputs: Inputs) -> Hashable:
    if others := inputs.keys() - _OF_WHOLE_SEQUENCES:
        raise ConfigError(
            f"train.cuda_graphs: the model is given {' and '.join(sorted(others))} too, by which sequences begin or "
            f"end elsewhere in each step; train on texts without padding, or {_WITHOUT}"
        )
    return tuple((name, value if value is None else (value.shape, value.dtype)) for name, value in inputs.items())


def _host_state() -> Hashable:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()
