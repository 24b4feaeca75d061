"""What a site is, and what a rule that finds sites must be able to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from veomni_core.spec import EAGER

if TYPE_CHECKING:  # planning from sites alone imports no torch
    from veomni_core.changes import Change

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """A place in a model where an op happens.

    ``path`` is the module's path in the model (empty for the model itself) and ``rule`` the name of the rule that
    found it. ``variant`` is ``None`` where no variant could be proven; ``evidence`` then says what was tried, and
    otherwise how the variant was proven. ``detail`` is what the rule needs to put a kernel there. ``own`` names what
    runs there when nothing is bound, where the model can be set to something else than its eager code. ``examined``
    is whether what the site computes could be seen: without a variant it is then something else than every variant,
    and otherwise an open question. ``needs`` are the features that a kernel must declare to run there, and ``refuses``
    those that it must not declare, each with the reason. ``declared`` is whether the variant is its author's word, not
    proven by value.
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
    refuses: Mapping[str, str] = field(default_factory=dict)
    declared: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", tuple(self.needs))


class SiteLocator(Protocol):
    """Finds the sites of one rule, and puts kernels there."""

    def find(self, model: Any, rule: str) -> Iterable[Site]:
        """The sites in ``model``; reads it, and never changes it or computes on its weights."""

    def install(self, model: Any, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        """The changes that make ``kernel`` run at ``site``; applied one by one, as they are yielded.

        ``kernel`` is ``None`` only for rules with ``installs_eager``: select the op's eager code.
        """
