"""The subclasses that a binding gives to modules, each with a ``forward`` that calls the kernel.

The kernel is a method of a class rather than an attribute of an instance, so ``self`` is always the module that runs.
A shallow copy, a ``DataParallel`` replica or a copy that PEFT makes therefore runs with its own weights. The subclasses
belong to one binding, so undoing it takes the kernel out of every copy too.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from veomni_core.changes.bound_subclass import EAGER, MADE_BY, bound_subclass, eager_class, is_bound_by
from veomni_core.changes.forward_functions import equivalence, replace_captured
from veomni_core.errors import SiteChangedError

logger = logging.getLogger(__name__)
_COPIED = object()  # its id is the key of ``copied`` in the memo of one deepcopy


class BoundClasses:
    """The subclasses that one binding made. Modules that are bound in the same way share one subclass.

    Regional ``torch.compile`` relies on the sharing: it compiles one layer's code for all layers of equal types.

    Attributes:
        on_change, training_logits: the config's values.
        binding: the binding that owns these classes; ``None`` for those of another transformation.
        paths: the module path of every bound module.
        owners: by guarded child module, the bound modules whose proof depends on it.
        copies: every copy that was made of a bound module.
        changed: by module path, what was changed after bind so that the site runs its own code again.
        remarked: by module path, what a site's kernel does in another way than was planned.
        copied: in a deep copy, each original class mapped to its copy. All sets that were copied together share it.
    """

    def __init__(self, on_change: str = "raise", training_logits: str = "deferred") -> None:
        self.on_change, self.training_logits = on_change, training_logits
        self.binding: Any = None
        self.paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.owners: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
        self.copies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.changed: dict[str, str] = {}
        self.remarked: dict[str, str] = {}
        self.copied: dict[type[nn.Module], type[nn.Module]] = {}
        self._made: dict[tuple[type[nn.Module], str, Hashable, frozenset[str]], type[nn.Module]] = {}

    def of(self, eager: type[nn.Module], name: str, value: Any, guarded: frozenset[str]) -> type[nn.Module]:
        """The subclass of ``eager`` whose attribute ``name`` is ``value``, cached by equivalent code."""
        function: Any = value.fget if isinstance(value, property) else value
        key = (eager, name, equivalence(function), guarded)
        if key not in self._made:
            self._made[key] = bound_subclass(eager, name, value, guarded, self)
        return self._made[key]

    def note(self, path: str, what: str, when: str = "from now on") -> None:
        """Record that the site at ``path`` runs its own code because of ``what``, and log it once."""
        if path not in self.changed:
            self.changed[path] = what
            logger.warning("%s runs its own code %s: %s", path, when, what)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note_in_trace(self, path: str, what: str) -> None:
        """As :meth:`note`, for code that ``torch.compile`` traces: Dynamo calls this at once, and no graph holds it."""
        self.note(path, what, "in a compiled step")

    def set_on(self, module: nn.Module, name: str) -> None:
        """Called before the guarded attribute ``name`` of ``module`` changes; raises if ``on_change`` is ``raise``."""
        path = self.paths.get(module, f"a copy of a bound {type(module).__name__}")
        what = f"{name} was changed after bind, and the proof of this site depends on it"
        if self.on_change == "raise":
            raise SiteChangedError(
                f"{path}: {what}. Call binding_of(model).undo() first and bind again after the change, or write "
                "`on_change: eager` under ops_implementation to let the module run its own code from then on"
            )
        owners = self.owners.get(module)
        if owners is None:
            self.note(path, what)
        for owner in owners or ():
            self.note(self.paths.get(owner, "a bound module"), f"{path}: {what}")
            if is_bound_by(owner, self):
                run_eager(owner)
        run_eager(module)

    def retire(self) -> None:
        """Take the kernels out of every class in this set, and so out of every copy of a bound module."""
        for module in list(self.copies):
            while vars(type(module)).get(MADE_BY) is self:
                module.__class__ = vars(type(module))[EAGER]
        for (_, name, _, _), bound in self._made.items():
            for each in (name, "__setattr__", "__delattr__"):
                if each in vars(bound):
                    delattr(bound, each)
            setattr(bound, MADE_BY, None)

    def rebase(self, kind: type[nn.Module], memo: dict[int, Any]) -> type[nn.Module]:
        """After a deepcopy: ``kind`` with the original set's classes among its bases replaced by this set's."""
        if kind in self.copied:
            return self.copied[kind]
        bases = tuple(self.rebase(base, memo) if issubclass(base, nn.Module) else base for base in kind.__bases__)
        if bases == kind.__bases__:
            return kind
        if (on_top := vars(kind).get(MADE_BY)) is not None:  # the set of another transformation
            copy.deepcopy(on_top, memo)
            return self.copied.get(kind, kind)
        # Other code has subclassed our class, as torch's parametrizations do: rebuild that subclass over the new base.
        namespace = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        self.copied[kind] = type(kind)(kind.__name__, bases, namespace)  # type: ignore[misc]
        return self.copied[kind]

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundClasses:
        duplicate = BoundClasses(self.on_change, self.training_logits)
        memo[id(self)] = duplicate
        duplicate.changed, duplicate.remarked = dict(self.changed), dict(self.remarked)
        duplicate.copied = memo.setdefault(id(_COPIED), {})
        for (_, name, _, guarded), bound in self._made.items():
            beneath = vars(bound)[EAGER]
            copy.deepcopy(vars(beneath).get(MADE_BY), memo)  # another transformation's set, if one is beneath
            eager = duplicate.copied.get(beneath, beneath)
            duplicate.copied[bound] = duplicate.of(eager, name, vars(bound)[name], guarded)
        for module, path in list(self.paths.items()):
            twin = copy.deepcopy(module, memo)
            duplicate.paths[twin] = path
            self._give_away(twin, duplicate, memo)
        for child, owners in list(self.owners.items()):
            duplicate.owners[copy.deepcopy(child, memo)] = weakref.WeakSet(copy.deepcopy(each, memo) for each in owners)
        for module in list(self.copies):
            if id(module) in memo:
                duplicate.copies.add(memo[id(module)])
                self._give_away(memo[id(module)], duplicate, memo)
        duplicate.binding = copy.deepcopy(self.binding, memo)
        return duplicate

    def _give_away(self, module: nn.Module, other: BoundClasses, memo: dict[int, Any]) -> None:
        """Hand ``module``, a copy that was made together with its binding, over to the copied binding ``other``."""
        self.copies.discard(module)
        module.__class__ = other.rebase(type(module), memo)


def run_eager(module: nn.Module) -> None:
    """Make ``module`` run its own code again, also where other code has subclassed the bound class."""
    kind = type(module)
    bound = [each for each in kind.__mro__ if EAGER in vars(each)]
    beneath = vars(bound[-1])[EAGER]
    for each in bound:
        replace_captured(module, vars(each).get("forward", beneath.forward), beneath.forward)
    if eager_class(kind) is beneath:
        module.__class__ = beneath
    else:  # FSDP2 or a parametrization has subclassed our class
        namespace = {"forward": beneath.forward, "__module__": kind.__module__, MADE_BY: None}
        module.__class__ = type(kind)(kind.__name__, (kind,), namespace)  # type: ignore[misc]
