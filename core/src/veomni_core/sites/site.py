"""What a site is, and what a rule that finds sites must be able to do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from veomni_core.spec import EAGER

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """A place in a model where an op happens.

    ``path`` is the module's path in the model (empty for the model itself) and ``rule`` the name of the rule that
    found it. ``variant`` is ``None`` where no variant could be proven; ``evidence`` then says what was tried, and
    otherwise how the variant was proven. ``detail`` is what the rule needs to put a kernel there. ``own`` names what
    runs there when nothing is bound, where the model can be set to something else than its eager code. ``examined``
    is whether what the site computes could be seen: without a variant it is then something else than every variant,
    and otherwise an open question. ``needs`` are the features that a kernel must declare to run there.
    """

    op_name: str
    path: str
    rule: str
    variant: str | None
    evidence: str
    dtype: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    own: str = EAGER
    examined: bool = True
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", tuple(self.needs))


class Change(Protocol):
    """One reversible change to a model."""

    def apply(self) -> None:
        """Make the change."""

    def revert(self) -> None:
        """Restore what was there before :meth:`apply`, exactly."""

    def overridden(self) -> str:
        """What somebody else has put in the place of this change, or an empty string."""

    @property
    def place(self) -> Hashable:
        """What is changed; a later change of the same place hides this one."""


class SiteLocator(Protocol):
    """Finds the sites of one rule, and puts kernels there."""

    def find(self, model: Any, rule: str) -> Iterable[Site]:
        """The sites in ``model``; reads it, and never changes it or computes on its weights."""

    def install(self, model: Any, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        """The changes that make ``kernel`` run at ``site``; applied one by one, as they are yielded.

        ``kernel`` is ``None`` only for rules with ``installs_eager``: select the op's eager code.
        """


class _Missing:
    """Marks an attribute that was not there; one object in every process and every copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Missing:
        return self


_MISSING = _Missing()


class AttributeChange:
    """Sets an attribute of one object, in the object's own ``__dict__``.

    For a module's ``forward`` this shadows the class's method for that one instance.
    """

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self.target, self.name, self.value = target, name, value
        self._before: Any = _MISSING

    def apply(self) -> None:
        self._before = vars(self.target).get(self.name, _MISSING)
        vars(self.target)[self.name] = self.value

    @property
    def place(self) -> Hashable:
        return (id(self.target), self.name)

    def overridden(self) -> str:
        if vars(self.target).get(self.name) is self.value:
            return ""
        return f"{type(self.target).__name__}.{self.name} was replaced since"

    def revert(self) -> None:
        if self._before is _MISSING:
            vars(self.target).pop(self.name, None)
        else:
            vars(self.target)[self.name] = self._before
