"""Makes the steps of one kind of site: one for the model's own code, and one for each kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.changes.change_set import ChangeSet
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Site, SiteLocator
from veomni_tools.tuning.leaves import as_leaves, form_of, shapes_of, tensors_in
from veomni_tools.tuning.replay import Recorder, Replay, replayable
from veomni_tools.tuning.step import Step
from veomni_tools.tuning.step_model import StepModel
from veomni_tools.tuning.watch import Function, Seen, Watch
from veomni_transformers.changes.bypassed_children import MadeModules
from veomni_transformers.proving.called_functions import replaced
from veomni_transformers.proving.functions import code_layers, current_forward, global_functions


class NotCalledError(Exception):
    """A step of the model doesn't call what is to be measured."""


class SiteSteps:
    """Makes steps at one site.

    Where the op is a function that a module's forward names, that function is timed on the arguments that it gets in
    the model. Elsewhere the innermost module that calls the kernel is timed, with its other children replayed.
    """

    def __init__(self, step_model: StepModel, site: Site, locator: SiteLocator) -> None:
        self._on, self._site, self._locator = step_model, site, locator
        self._caller: str | None = None  # the module that is timed, once a kernel was seen there
        self._replayed: set[str] = set()
        self._hands_on = ""
        self.timed = ""
        """What one call is, in words."""

    def of_kernel(self, spec: KernelSpec, kernel: Function) -> Step:
        """The step in which ``kernel`` runs.

        Raises:
            NotCalledError: a step of the model doesn't call the kernel.
        """
        if (function := self._function(spec, kernel)) is not None:
            return self._function_step(function.name, function.own, function.bound)
        watch = Watch(self._on.model)
        seen = watch.first_call(self._on.run, partial(self._bound, spec, watch.calls_of(kernel)))
        if seen is None:
            raise NotCalledError("a step of the model does not call it")
        module = self._on.model.get_submodule(seen.path)
        recorder = Recorder(module, replayable(module, self._touched(spec, kernel)))
        with self._bound(spec, recorder.marking(kernel)):
            replay = self._recorded(recorder, module, seen)
        if self._caller is None:
            self._caller, self._replayed, self._hands_on = seen.path, {*replay.results}, replay.skipped_output
        return self._module_step(seen, replay, partial(self._bound, spec, kernel))

    def of_own_code(self, spec: KernelSpec, kernel: Function) -> Step:
        """The step in which the model's own code runs, in the place where ``kernel`` would.

        Raises:
            NotCalledError: a step of the model doesn't call it.
        """
        if (function := self._function(spec, kernel)) is not None:
            return self._function_step(function.name, function.own, function.own)
        if self._caller is None:
            raise NotCalledError("no kernel was seen there, so it is not known which module calls one")
        seen = Watch(self._on.model).call_of_module(self._caller, self._on.run)
        if seen is None:
            raise NotCalledError("a step of the model does not call its module")
        module = self._on.model.get_submodule(seen.path)
        replay = self._recorded(Recorder(module, self._replayed), module, seen)
        replay.results = {name: results for name, results in replay.results.items() if name in self._replayed}
        replay.skipped_output = self._hands_on
        return self._module_step(seen, replay, nullcontext)

    def _function(self, spec: KernelSpec, kernel: Function) -> _Replaced | None:
        """The function of a forward that the kernel would replace, if that is all that is changed."""
        # With batch invariance that for single tokens is replaced too, which no step of training calls.
        spec = replace(spec, batch_invariant=False)
        made = self._locator.install(self._on.model, self._site, kernel, spec)
        changes = [each for each in made if not isinstance(each, MadeModules)]  # which changes nothing
        return _replaced_by(changes[0]) if len(changes) == 1 else None

    def _function_step(self, name: str, own: Function, function: Function) -> Step:
        watch, module = Watch(self._on.model), self._on.model.get_submodule(self._site.path)
        seen = watch.first_call(self._on.run, lambda: _applied(replaced(module, name, watch.calls_of(own))))
        if seen is None or seen.function_kwargs is None:
            raise NotCalledError(f"a step of the model does not call {name}")
        args, kwargs = as_leaves(seen.function_args), as_leaves(seen.function_kwargs)
        self.timed = f"{name} in {self._where(seen.path)}"
        leaves = [each for each in tensors_in((args, kwargs)) if each.requires_grad]
        form = (name, form_of((args, kwargs)))
        forward = partial(function, *args, **kwargs)
        return Step(forward, leaves, self._on.autocast_on, form=form, shapes=shapes_of((args, kwargs)))

    def _module_step(self, seen: Seen, replay: Replay, bound: Callable[[], Any]) -> Step:
        module, args, kwargs = self._on.model.get_submodule(seen.path), as_leaves(seen.args), as_leaves(seen.kwargs)
        left_out = {*replay.results, replay.skipped_output}
        names = [name for name, _ in module.named_children() if name in left_out]
        self.timed = self._where(seen.path) + (f", without {' and '.join(names)}" if names else "")
        parameters = [
            parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name.partition(".")[0] not in left_out
        ]
        given = (args, kwargs, list(replay.results.values()))

        @contextmanager
        def in_place() -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(bound())
                stack.enter_context(replay.in_place_of_children(module))
                yield

        leaves: list[Tensor] = [*(each for each in tensors_in(given) if each.requires_grad), *parameters]
        form = (type(module).__name__, form_of(given), form_of(parameters), replay.skipped_output)
        return Step(partial(module, *args, **kwargs), leaves, self._on.autocast_on, in_place, form, shapes_of(given))

    def _recorded(self, recorder: Recorder, module: nn.Module, seen: Seen) -> Replay:
        def run() -> Any:
            with torch.enable_grad(), self._on.autocast_on():
                return module(*seen.args, **seen.kwargs)

        return recorder.record(run)

    def _bound(self, spec: KernelSpec, kernel: Function) -> AbstractContextManager[None]:
        """The model with ``kernel`` at this one site."""
        return _applied(self._locator.install(self._on.model, self._site, kernel, spec), self._site.path)

    def _touched(self, spec: KernelSpec, kernel: Function) -> list[nn.Module]:
        """The modules that binding ``kernel`` changes."""
        changes = self._locator.install(self._on.model, self._site, kernel, spec)
        return [target for each in changes if (target := getattr(each, "target", None)) is not None]

    def _where(self, path: str) -> str:
        return f"{type(self._on.model.get_submodule(path)).__name__}{f' at {path}' if path else ''}"


@dataclass(frozen=True)
class _Replaced:
    """A function that a change replaces: its name, itself, and what stands in its place."""

    name: str
    own: Function
    bound: Function


def _replaced_by(change: Change) -> _Replaced | None:
    """The one global that the new forward of ``change`` sees otherwise than the old one, which is the same code."""
    if not isinstance(change, ForwardChange):
        return None
    before, after = current_forward(change.target), change.forward
    if [each.__code__ for each in code_layers(before)] != [each.__code__ for each in code_layers(after)]:
        return None
    own, new = dict(global_functions(before)), dict(global_functions(after))
    found = [_Replaced(name, own[name], new[name]) for name in own if new.get(name) is not own[name]]
    return found[0] if len(found) == 1 and callable(found[0].own) else None


@contextmanager
def _applied(changes: Iterable[Change], path: str = "") -> Iterator[None]:
    applied = ChangeSet()
    try:
        for change in changes:
            applied.apply(change, path)
        yield
    finally:
        applied.revert()
