"""Runs a module's own code beside each kernel while a model trains, and stops all ranks where the two differ."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_conformance.bound_models.exact_runs import exact_run
from veomni_conformance.bound_models.model_calls import RecordedCall, draw_again, kept, undisturbed
from veomni_conformance.bound_models.site_comparison import Run, compare
from veomni_conformance.bound_models.suspension import suspended
from veomni_conformance.ranks.sentences import sentences_of_all_ranks
from veomni_core.binding.binding import binding_of
from veomni_core.binding.site_changes import owner_of
from veomni_core.changes.change import Change
from veomni_core.changes.transformation import transformations_of
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import BindingError, ConformanceError
from veomni_ops.contract import Contract, contract_for

_OTHER_CACHE = "it was called with a cache that holds tokens"


@dataclass(frozen=True)
class _Site:
    """One bound site: its kernel, its contract, and the changes without which its module runs its own code."""

    kernel: str
    contract: Contract
    backward: bool
    changes: tuple[Change, ...]


class Shadow:
    """Compares every bound site of a model with its module's own code, in each training forward, until :meth:`end`.

    What a site computes in the forward is compared with what its module's own code computes from the same inputs and
    random states. For the gradients both run once more, on copies, backward from the same random upstream gradients.
    The limits are those of ``bind(verify=True)``: twice the tolerance of the op's contract. The training goes on as it
    would without: its values, its random states and its gradients are not touched. Sites that belong to the whole model
    (its attention, its loss) run the whole model again, so a step takes several times its time and memory.

    Args:
        model: a bound model. Wrappers around it (DDP, Trainer's autocast, PEFT's) may be there or come later.
        registry: the plugins that it was bound from; discovered without it.

    Attributes:
        breaches: by module path, how a site differs. It is compared no further then.
        not_compared: by module path, why a site can't be compared.
        compared: how often each site was compared.

    Raises:
        BindingError: the model is not bound, nothing is bound in it, or a transformation was applied on top of its
            binding.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from veomni_core import bind
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64)).train()
        >>> binding = bind(model, {"preset": "eager", "rms_norm_implementation": "torch"}, device="cpu")
        >>> ids = torch.tensor([[5, 9, 17, 3]])
        >>> with Shadow(model) as shadow:
        ...     model(ids, labels=ids).loss.backward()
        ...     shadow.raise_if_breached()
        >>> len(shadow.compared), shadow.breaches, shadow.not_compared
        (5, {}, {})
    """

    def __init__(self, model: nn.Module, registry: Registry | None = None) -> None:
        binding = binding_of(model)
        if binding is None:
            raise BindingError("a shadow runs beside kernels, and this model is not bound: call bind first")
        if above := [each for each in transformations_of(binding.model) if each is not binding]:
            raise BindingError(
                f"{above[-1].name} ({above[-1].describe()}) was applied on top of the binding, so modules' own code "
                "can't run beside the kernels: look at a model without it"
            )
        self._binding, self._model, self._autocast = binding, binding.model, binding.plan.autocast
        registry = registry or discover()
        self._sites: dict[str, list[_Site]] = {}
        self._passed_by: list[str] = []
        for op in binding.plan.ops:
            for decision in op.sites:
                if (spec := decision.spec) is not None:
                    if registry.op(spec.op_name).on_request:
                        self._passed_by.append(f"{spec}: it runs only where it is asked for, and not in a forward")
                        continue
                    contract = contract_for(registry.op(spec.op_name), spec.variant)
                    changes = binding.changes_made_at(decision.site.path, owner_of(op, decision))
                    site = _Site(str(spec), contract, spec.backward, changes)
                    self._sites.setdefault(decision.site.path, []).append(site)
        if not self._sites:
            raise BindingError(
                "a shadow runs beside kernels, and this model's plan has none in its forward: every site is eager there"
            )
        self.breaches: dict[str, str] = {}
        self.not_compared: dict[str, str] = {}
        self.compared: Counter[str] = Counter()
        self.replaying = False
        self._began: dict[str, tuple[RecordedCall, Callable[[], None]]] = {}
        self._handles: list[Any] = []
        for path in self._sites:
            module = self._model.get_submodule(path)
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(path), with_kwargs=True))

    def __enter__(self) -> Shadow:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Leave the model as it was: from now on nothing runs beside its kernels."""
        while self._handles:
            self._handles.pop().remove()
        self._began.clear()

    def raise_if_breached(self, when: str = "") -> None:
        """Raise on every rank if a site of any rank differs. Each rank of a distributed job must call this.

        Args:
            when: for the message, such as ``step 3``.

        Raises:
            ConformanceError: the message names each rank, site and kernel, and how it differs.
            HostError: some ranks did not answer in time.
        """
        mine = [f"{path or 'the model'}: {how}" for path, how in self.breaches.items()]
        found = sentences_of_all_ranks("shadow", mine)
        if found:
            what = "\n  ".join(found)
            raise ConformanceError(
                f"{f'{when}: ' if when else ''}kernels differ from their modules' own code, which ran beside them:\n"
                f"  {what}\n"
                "Name another kernel there, or eager (`veomni explain OP` lists them)"
            )

    def describe(self) -> str:
        """What was compared, in a sentence for each kernel, and what was not."""
        counted: Counter[str] = Counter()
        for path in self.compared:
            counted.update(site.kernel for site in self._sites[path])
        lines = [f"{kernel} at {count} sites" for kernel, count in counted.items()]
        lines += [f"not compared: {path or 'the model'}: {why}" for path, why in self.not_compared.items()]
        return "\n".join([*lines, *(f"not compared: {each}" for each in self._passed_by)])

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._is_asked(path, module):
                return
            if any(hasattr(parameter, "placements") for parameter in module.parameters()):
                self.not_compared[path] = "its parameters are sharded"
            elif any(_is_cache(value) and value.get_seq_length() > 0 for value in (*args, *kwargs.values())):
                self.not_compared[path] = _OTHER_CACHE
            else:
                call = RecordedCall(kept(_without_caches(args)), kept(_without_caches(kwargs)))
                self._began[path] = call, _random_states(module)

        return hook

    def _after(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            began = None if self.replaying else self._began.pop(path, None)
            if began is not None:
                with self._aside(module):
                    self._compare(path, module, *began, Run.that_gave(result))

        return hook

    def _is_asked(self, path: str, module: nn.Module) -> bool:
        known = path in self.breaches or path in self.not_compared
        return module.training and not self.replaying and not known

    def _compare(
        self,
        path: str,
        module: nn.Module,
        call: RecordedCall,
        set_random_states: Callable[[], None],
        given: Run,
    ) -> None:
        sites = self._sites[path]
        if changed := self._binding.overridden(change for site in sites for change in site.changes):
            self.not_compared[path] = f"it does not run what was bound: {changed}"
            return
        gradients = torch.is_grad_enabled() and all(site.backward for site in sites)
        bound = Run.of(module, call, self._autocast, gradients, set_random_states)
        for site in sites:
            with suspended(site.changes):
                own = Run.of(module, call, self._autocast, gradients, set_random_states)
            if own.problem:
                self.not_compared[path] = f"its own code can't be run alone: {own.problem}"
                return
            difference = compare(own.without_gradients(), given, site.contract, self._autocast)
            if not difference:
                difference = f"raised {bound.problem}" if bound.problem else ""
            if not difference:
                exact = partial(self._exact_run, site, module, call, gradients, set_random_states)
                difference = compare(own, bound, site.contract, self._autocast, exact)
            if difference:
                self.breaches[path] = f"{site.kernel}: {difference}"
                return
        self.compared[path] += 1

    @staticmethod
    def _exact_run(site: _Site, *call: Any) -> Run:
        with suspended(site.changes):
            return exact_run(*call)

    @contextmanager
    def _aside(self, module: nn.Module) -> Iterator[None]:
        """Run what does not belong to the training: it leaves no trace in the module, nor in who watches autograd."""
        self.replaying = True
        try:
            # Without hooks of their own, tensors that are saved here would go to those of a checkpoint around.
            with undisturbed(module), torch.autograd.graph.saved_tensors_hooks(_same, _same):
                yield
        finally:
            self.replaying = False


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _random_states(module: nn.Module) -> Callable[[], None]:
    """A function by which the numbers are drawn that the CPU and the GPUs of ``module`` would draw now."""
    devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
    generators = [torch.default_generator, *(torch.cuda.default_generators[each.index or 0] for each in devices)]
    return partial(draw_again, {generator.device: generator.get_state() for generator in generators})


def _is_cache(value: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(value, transformers.Cache)


def _without_caches(value: Any) -> Any:
    """``value`` without empty caches, which a second run would fill for the first one."""
    if _is_cache(value):
        return None
    if isinstance(value, dict):
        return {name: _without_caches(each) for name, each in value.items()}
    return tuple(map(_without_caches, value)) if type(value) is tuple else value
