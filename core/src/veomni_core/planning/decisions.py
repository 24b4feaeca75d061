"""A plan's decisions for one site and for one op: which kernel runs there, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from veomni_core.descriptions.spec import EAGER
from veomni_core.sites.site import Site


@dataclass(frozen=True)
class SiteDecision:
    """What runs at one site, and why.

    Attributes:
        site: the site.
        kernel: the name of the kernel, or ``eager``.
        reason: why it was chosen, or why the site stays eager.
        as_asked: whether the config names exactly this choice.
        dtypes: the dtypes in which the site's inputs may arrive, as far as is known. There are two where autocast may
            or may not have cast them.
    """

    site: Site
    kernel: str
    reason: str
    as_asked: bool = True
    dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", tuple(self.dtypes))

    @property
    def bound(self) -> bool:
        """Whether a kernel replaces the model's own code."""
        return self.kernel != EAGER

    @property
    def runs(self) -> str:
        """What runs at the site: a kernel; ``eager`` if the config requests it; else what the model is set to."""
        return self.kernel if self.bound or self.as_asked else self.site.own


@dataclass(frozen=True)
class OpDecision:
    """What one config field requests, and what was decided at every site of its op."""

    op_name: str
    config_field: str
    asked: Any
    written: bool
    sites: tuple[SiteDecision, ...]

    @property
    def chosen(self) -> tuple[str, ...]:
        """The kernels that are used, by falling number of sites; only ``eager`` if none is."""
        counts = Counter(decision.kernel for decision in self.sites if decision.bound)
        return tuple(name for name, _ in counts.most_common()) or (EAGER,)

    @property
    def left_eager(self) -> tuple[SiteDecision, ...]:
        """The sites where the model's own code runs."""
        return tuple(decision for decision in self.sites if not decision.bound)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> OpDecision:
        """The decision that ``dataclasses.asdict`` turned into ``data``."""
        sites = tuple(SiteDecision(**{**decision, "site": Site(**decision["site"])}) for decision in data["sites"])
        return cls(**{**data, "sites": sites})
