"""What a plan says of one site, and of one op: which kernel runs there, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from veomni_core.sites.site import Site
from veomni_core.spec import EAGER


@dataclass(frozen=True)
class SiteDecision:
    """What runs at one site: a kernel's name or ``eager``, and why; ``as_asked`` if the config names just that.

    ``dtypes`` are those in which the site gets its data, as far as is known: one, or two where autocast may have cast
    what comes, or may not.
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
        """Whether a kernel takes the place of the model's own code."""
        return self.kernel != EAGER

    @property
    def runs(self) -> str:
        """What runs at the site: a kernel, the eager code where it was asked for, else whatever the model is set to."""
        return self.kernel if self.bound or self.as_asked else self.site.own


@dataclass(frozen=True)
class OpDecision:
    """What one config field asked for, and what came of it at every site of its op."""

    op_name: str
    config_field: str
    asked: Any
    written: bool
    sites: tuple[SiteDecision, ...]

    @property
    def chosen(self) -> tuple[str, ...]:
        """The kernels that run somewhere, most sites first; ``eager`` alone where none does."""
        counts = Counter(decision.kernel for decision in self.sites if decision.bound)
        return tuple(name for name, _ in counts.most_common()) or (EAGER,)

    @property
    def left_eager(self) -> tuple[SiteDecision, ...]:
        """The sites where the model's own code runs."""
        return tuple(decision for decision in self.sites if not decision.bound)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> OpDecision:
        """The decision that ``dataclasses.asdict`` gave."""
        sites = tuple(SiteDecision(**{**decision, "site": Site(**decision["site"])}) for decision in data["sites"])
        return cls(**{**data, "sites": sites})
