"""The changes that one transformation makes to a model, made and reverted together. One rule owns each ``forward``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from veomni_core.changes.bound_classes import BoundClasses
from veomni_core.changes.bound_subclass import is_bound_by
from veomni_core.changes.change import AttributeChange, Change, ClassChange, ForwardChange
from veomni_core.changes.forward_functions import modules_held, names_in, only_reads, reaches
from veomni_core.errors import BindingError, SpecError

logger = logging.getLogger(__name__)


class ChangeSet:
    """Changes to one model that are applied and reverted together."""

    def __init__(self, on_change: str = "raise", training_logits: str = "deferred") -> None:
        self.classes = BoundClasses(on_change, training_logits)
        self._owned: list[_Owned] = []
        self._outermost: dict[Hashable, _Owned] = {}
        self._said: set[tuple[str, str]] = set()

    def __iter__(self) -> Iterator[Change]:
        return (each.change for each in self._owned)

    def apply(self, change: Change, path: str = "", owner: str = "") -> None:
        """Apply one more change at the module path ``path``, on behalf of the rule ``owner``.

        Raises:
            BindingError: another rule has already replaced this module's forward, and its kernel would never run.
            SpecError: the new forward holds a reference to a module, so that copies would run the original's weights.
        """
        if isinstance(change, ClassChange):
            change.classes = self.classes
            self.classes.paths[change.target] = path or "the model"
        if isinstance(change, ForwardChange):
            change.refuse_own_forward()
            _refuse_held_modules(change, owner)
            self._refuse_second_owner(change, path, owner)
        if isinstance(change, AttributeChange) and change.name == "forward":
            raise SpecError(
                f"{owner or 'a rule'} sets {type(change.target).__name__}.forward on the instance: copies would not "
                "run their own weights. Yield a veomni_core.authoring.ForwardChange instead"
            )
        change.apply()
        self._outermost[change.place] = _Owned(path, owner, change)
        self._owned.append(self._outermost[change.place])

    def made_at(self, path: str, owner: str) -> tuple[Change, ...]:
        """The changes that ``owner`` made at the module path ``path``, in the order in which they were made."""
        return tuple(each.change for each in self._owned if (each.path, each.owner) == (path, owner))

    def is_outermost(self, change: Change) -> bool:
        """Whether no later change hides ``change`` at its place, so that what is around the place is around it."""
        return self._outermost[change.place].change is change

    def refuse_hidden(self) -> None:
        """Check that no replaced forward hides what another rule put into the same module or into a child.

        Raises:
            BindingError: one does; the message names both rules and both paths.
        """
        replaced = {
            each.path: each
            for each in self._owned
            if isinstance(each.change, ForwardChange) and not each.change.keeps_original
        }
        for each in self._owned:
            for above in (each.path, *_paths_above(each.path)) if each.owner else ():
                holder = replaced.get(above)
                if holder is None or (above == each.path and holder.owner == each.owner) or _calls(holder, each):
                    continue
                raise BindingError(
                    f"{holder.owner} replaces the forward of {above or 'the model'}, and what {each.owner} put into "
                    f"{each.path or 'the model'} would never run. {_ONE_OF_THEM} If the new forward does use it, "
                    "declare that in its rule: ForwardChange(..., calls=(its name,))"
                )

    def never_called(self) -> Iterator[tuple[str, str]]:
        """``(module path, why)`` of each new forward that no other calls: the one above it reads its module alone."""
        forwards = {
            each.path: (each.owner, each.change) for each in self._owned if isinstance(each.change, ForwardChange)
        }
        for path in forwards:
            for above in _paths_above(path):
                name = path.removeprefix(f"{above}." if above else "").split(".")[0]
                owner, change = forwards.get(above, ("", None))
                if change is not None and not change.keeps_original and only_reads(change.forward, name):
                    yield path, f"never called: {owner} replaces the forward around it, which only reads it"

    def changed(self, model: nn.Module | None = None, above: Collection[Hashable] = ()) -> Iterator[tuple[str, str]]:
        """``(module path, reason)`` of every site of ``model`` that does not run what was bound, or in another way.

        Each reason is logged once. Places ``above``, which a transformation on top changes too, are left out. Writes to
        a config or to an unguarded attribute raise nothing; they are noticed only when this is called.
        """
        reasons = {path: [what] for path, what in self.classes.changed.items()}
        for each in {each.change.place: each for each in self._owned}.values():
            what = "" if each.change.place in above else each.change.overridden()
            path = each.path or "the model"
            if what and not (isinstance(each.change, ForwardChange) and path in self.classes.changed):
                reasons[path] = list(dict.fromkeys((*reasons.get(path, ()), what)))
        for path, what in self._gone(model) if model is not None else ():
            reasons.setdefault(path or "the model", [what])
        remarks = dict(self.classes.remarked)
        for path, whats in reasons.items():
            said = "; ".join(whats)
            if path not in self.classes.changed and (path, said) not in self._said:
                self._said.add((path, said))
                logger.warning("%s does not run what was bound any more: %s", path, said)
            yield path, "; ".join((said, remarks.pop(path))) if path in remarks else said
        yield from remarks.items()

    def written(self) -> Iterator[tuple[str, str]]:
        """``(module path, what)`` of each bound module whose guarded settings were written past the guard."""
        for each in self._owned:
            if isinstance(each.change, ClassChange) and (what := each.change.written()):
                yield each.path or "the model", what

    def revert(self) -> None:
        """Revert every change, the last one first."""
        while self._owned:
            self._owned.pop().change.revert()
        self._outermost.clear()
        self.classes.retire()

    def __deepcopy__(self, memo: dict[int, Any]) -> ChangeSet:
        duplicate = ChangeSet()
        memo[id(self)] = duplicate
        duplicate.classes = copy.deepcopy(self.classes, memo)
        duplicate._owned = [replace(each, change=copy.deepcopy(each.change, memo)) for each in self._owned]
        duplicate._said = set(self._said)
        return duplicate

    def _gone(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """``(module path, what)`` of each new forward whose module other code has taken out, without leaving a copy."""
        modules = dict(model.named_modules(remove_duplicate=False))
        there = {*modules.values()}
        owned = [(each.path, each.change) for each in self._owned if isinstance(each.change, ForwardChange)]
        forwards = {getattr(change, "path", path): change.target for path, change in owned}  # of a site's layers too
        for path, target in forwards.items():
            above, _, name = path.rpartition(".")
            at = next(each for each in (path, *_paths_above(path)) if each in modules)
            if (hiding := vars(modules.get(above, model)).get(name, target)) is not target:
                yield path, f"{type(hiding).__name__} was set in its place"
            elif target not in there and not any(is_bound_by(each, self.classes) for each in modules[at].modules()):
                kind, where = type(modules[at]).__name__, at or "the model"
                yield path, f"{kind} was put in its place" if at == path else f"it was taken out of {where} ({kind})"

    def _refuse_second_owner(self, change: ForwardChange, path: str, owner: str) -> None:
        """Refuse a second forward for one module unless it calls the first: else the first one's kernel never runs."""
        before = self._outermost.get(change.place)
        if before is not None and not reaches(change.forward, type(change.target).forward):
            raise BindingError(
                f"{path or 'the model'}: {before.owner} and {owner} both replace its forward, and the kernel of the "
                f"first would never run. {_ONE_OF_THEM}"
            )


@dataclass(frozen=True)
class _Owned:
    """A change, its module path, and the rule that made it."""

    path: str
    owner: str
    change: Change


def _paths_above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _calls(holder: _Owned, other: _Owned) -> bool:
    """Whether the forward of ``holder`` names the child that holds ``other``, or the attribute that ``other`` sets."""
    assert isinstance(holder.change, ForwardChange)
    called = names_in(holder.change.forward) | holder.change.calls
    if other.path == holder.path:
        # What an instance's own forward has captured runs around the class's forward, which is what holder replaces.
        around = isinstance(other.change, ForwardChange) or getattr(other.change, "around_forward", False)
        return around or getattr(other.change, "name", "") in called
    within = other.path.removeprefix(f"{holder.path}." if holder.path else "")
    return within.split(".")[0] in called


_ONE_OF_THEM = "Make one of the two eager at this path; write in its field {'<path>': eager, default: <kernel>}."


def _refuse_held_modules(change: ForwardChange, owner: str) -> None:
    held = sorted({type(module).__name__ for module in modules_held(change.forward)})
    if held:
        raise SpecError(
            f"{owner or 'a rule'}: the forward that it gives to a {type(change.target).__name__} holds a module "
            f"({', '.join(held)}), so that copies and replicas would run the original's weights. Write it as a "
            "function of (self, ...) that takes what it needs from self"
        )
