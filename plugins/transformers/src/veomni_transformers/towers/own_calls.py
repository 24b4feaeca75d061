"""What a model runs only where it is given a medium, if its forward runs towers itself: found by running it both ways.

A copy without weights runs on words alone, and on words with the smallest image or sound. What ran only the second time
is what a step without a medium leaves out: a tower, a projector, and in Mllama also the decoder's layers that look at
images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.sites.walk import named_modules
from veomni_transformers.proving import probe
from veomni_transformers.proving.hollow_twin import LinearsOfZeros, hollow_twin
from veomni_transformers.towers.feature_calls import FeatureCall, read_tensors
from veomni_transformers.towers.host_metadata import without_layers
from veomni_transformers.towers.parts import towers
from veomni_transformers.towers.smallest_input import Inputs, check_zero, forms, small_copy, with_own_code

_LAYERS = 2  # of each stack, in copies with weights
_FEW = 2  # words; one alone would be a step of generation
_OF_WORDS = "attention_mask"
_FIELD = "last_hidden_state"
FLOW, ALONE = "flow", "alone"  # sources: what a part gives that always runs, or parts that don't


@dataclass(frozen=True)
class Given:
    """A tensor that a part was given, and its source; an empty one if it carries no gradient."""

    tensor: Tensor
    source: str


@dataclass(frozen=True)
class OwnCall:
    """One call of a part of a model that is left out without a medium.

    Attributes:
        path: the part.
        before: the part that runs next, with a medium and without.
        args: what it was called with, on the CPU; a tensor as :class:`Given`.
        kwargs: the same, by name.
    """

    path: str
    before: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, part: nn.Module, zeros: Mapping[str, Tensor]) -> list[Tensor]:
        """What ``part`` computes of it, where its weights are and in their dtype.

        ``zeros`` are added to what it is given, by its source: gradients then pass as they do with a medium, and FSDP2
        reduces those of the part when a rank with a medium does.
        """
        weight = next(part.parameters())

        def moved(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(moved, value))
            if not isinstance(value, Given):
                return value
            if not value.tensor.is_floating_point():
                return value.tensor.to(weight.device)
            there = value.tensor.to(weight.device, weight.dtype)
            return there + zeros[value.source].to(there.dtype) if value.source in zeros else there

        kwargs = {name: moved(value) for name, value in self.kwargs.items()}
        return read_tensors(part(*map(moved, self.args), **kwargs), _FIELD)


def own_calls(module: Any, call: FeatureCall) -> tuple[tuple[OwnCall, ...], str]:
    """The calls that ``module`` makes only where it is given ``call.argument``, in their order.

    Each was run on a copy of its part with random weights: the results are finite, and every gradient that a sum of
    them at zero weight leaves on the copy's weights is zero.

    Returns:
        The calls, and an empty text; or none, and what the last form of inputs led to.
    """
    why_not = "no part of it takes such inputs"
    held = {path.partition(".")[0] for paths in towers(module).values() for path in paths}
    for spared in (set[str](), held):  # an image of real size is thousands of tokens, but layers may give more than one
        with probe.seeded():
            recorder, failed = probe.attempt(partial(_Recorder, module, spared))
            if failed:
                return (), failed
            for inputs in forms(module, call):
                found, why_not = probe.attempt(partial(_compared, recorder, call, inputs))
                if not why_not:
                    _, why_not = probe.attempt(partial(_check, module, found))
                    return ((), why_not) if why_not else (found, "")
    return (), why_not


class _Ran:
    def __init__(self, path: str, within: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.path, self.within, self.args, self.kwargs = path, within, args, kwargs
        self.output: Any = None


class _Recorder:
    """Notes which parts with weights a copy of ``module`` runs. Of its children only those ``spared`` have layers."""

    def __init__(self, module: nn.Module, spared: set[str]) -> None:
        twin: Any = with_own_code(hollow_twin(module)).eval()
        for name, child in twin.named_children():
            if name not in spared:
                without_layers(child)
        self._twin = twin
        self._calls: list[_Ran] = []
        self._within: list[str] = []
        self._options = {"use_cache": False} if probe.takes(twin, "use_cache") else {}
        for path, each in named_modules(twin):
            if path and any(True for _ in each.parameters()):
                vars(each)["forward"] = partial(self._run, path, each.forward)

    def ran(self, words: Tensor, **inputs: Any) -> tuple[list[_Ran], str]:
        """The calls on ``words`` with ``inputs``, and what they ended in; empty for a result."""
        self._calls, self._within = [], []
        with torch.no_grad(), LinearsOfZeros():
            _, failed = probe.attempt(lambda: self._twin(input_ids=words, **inputs, **self._options))
        return self._calls, failed

    def token(self, modality: str) -> int:
        """What stands for a medium among words."""
        names = (f"{modality}_token_id", f"{modality}_token_index")
        return next((getattr(self._twin.config, name) for name in names if hasattr(self._twin.config, name)), 0)

    def _run(self, path: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        call = _Ran(path, tuple(self._within), args, kwargs)
        self._calls.append(call)
        self._within.append(path)
        call.output = forward(*args, **kwargs)
        self._within.pop()
        return call.output


def _compared(recorder: _Recorder, call: FeatureCall, inputs: Inputs) -> tuple[OwnCall, ...]:
    inputs = {name: each for name, each in inputs.items() if name != _OF_WORDS}
    plain, failed = recorder.ran(torch.zeros(1, _FEW, dtype=torch.long))
    if failed:
        raise ValueError(failed)
    common = {each.path for each in plain}

    def ran_with(length: int) -> tuple[list[_Ran], list[int], str]:
        calls, failed = recorder.ran(torch.full((1, length), recorder.token(call.modality)), **inputs)
        outer = [n for n, each in enumerate(calls) if each.path not in common and common.issuperset(each.within)]
        return calls, outer, failed

    calls, outer, failed = ran_with(_FEW)
    if failed and outer:  # now it is known how many words stand for the medium
        features = read_tensors(calls[outer[-1]].output, _FIELD)
        calls, outer, failed = ran_with(max([_FEW, *(each.numel() // each.shape[-1] for each in features[:1])]))
    if failed or not outer:
        raise ValueError(failed or "it runs nothing else with such inputs")
    if [each.path for each in calls if each.path in common] != [each.path for each in plain]:
        raise ValueError("with such inputs it runs its other parts in another order")
    found = []
    for number in outer:
        each = calls[number]
        after = [later.path for later in calls[number:] if later.path in common]
        if not after:
            raise ValueError(f"nothing runs after {each.path}")
        flow = [id(earlier.output) for earlier in calls[:number] if earlier.path in common]
        kwargs = {name: _given(name, value, flow) for name, value in each.kwargs.items()}
        found.append(OwnCall(each.path, after[0], tuple(_given("", value, flow) for value in each.args), kwargs))
    return tuple(found)


def _check(module: Any, calls: tuple[OwnCall, ...]) -> None:
    """Run one call of each kind of part. Raises if its results or gradients are not as they must be."""
    parts = {type(part): (part, call) for call in calls for part in [module.get_submodule(call.path)]}
    for part, call in parts.values():
        attention = "sdpa" if getattr(part, "_supports_sdpa", False) else "eager"
        for whole in (False, True):  # a tower may read what its last layers give, by their numbers
            small = small_copy(part, _LAYERS, repeated=whole, attention=attention).eval()
            if whole:
                without_layers(small, after=_LAYERS)
            _, why_not = probe.attempt(partial(_run_at_zero, small, call))
            if not why_not:
                break
        if why_not:
            raise ValueError(why_not)


def _run_at_zero(small: nn.Module, call: OwnCall) -> None:
    check_zero(small, call.run(small, {}))


def _given(name: str, value: Any, flow: Sequence[int]) -> Any:
    """``value`` of an argument, for :class:`OwnCall`; ``flow`` are the ids of what parts gave that always run."""
    if isinstance(value, tuple | list):
        return type(value)(_given(name, each, flow) for each in value)
    if not isinstance(value, Tensor):
        return value
    is_computed = value.is_floating_point() and not value.any()  # by weights, which are zeros
    if is_computed and name.endswith("mask"):
        return None  # it hides nothing, and kernels take masks in forms of their own
    return Given(value, "" if not is_computed else FLOW if id(value) in flow else ALONE)
