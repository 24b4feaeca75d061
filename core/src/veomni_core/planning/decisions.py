"""A plan's decisions for one site and for one op: which kernel runs there, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from veomni_core.descriptions.kernel_spec import EAGER, KernelSpec
from veomni_core.sites.site import Site


@dataclass(frozen=True)
class SiteDecision:
    """What runs at one site, and why.

    Attributes:
        site: the site.
        spec: the kernel that was chosen; ``None`` for the model's own code.
        reason: why it was chosen, or why the site stays eager.
        as_asked: whether the config names exactly this choice.
        dtypes: the dtypes in which the site's inputs may arrive, as far as is known. There are two where autocast may
            or may not have cast them.
        glob: the glob of the config field that matches the site's path; ``None`` if none does.
    """

    site: Site
    spec: KernelSpec | None
    reason: str
    as_asked: bool = True
    dtypes: tuple[str, ...] = ()
    glob: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", tuple(self.dtypes))

    @property
    def kernel(self) -> str:
        """The kernel's name, with what the job sets of its options; or ``eager``."""
        return EAGER if self.spec is None else self.spec.label

    @property
    def bound(self) -> bool:
        """Whether a kernel replaces the model's own code."""
        return self.spec is not None

    @property
    def runs(self) -> str:
        """What runs at the site: a kernel; ``eager`` if the config requests it; else what the model is set to."""
        return self.kernel if self.bound or self.as_asked else self.site.own

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the site's proof leaves out for the kernel that is bound there."""
        return () if self.spec is None else self.site.left_out_of(self.spec)

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain data, with the kernel's name in place of its spec."""
        rest = {name: getattr(self, name) for name in ("kernel", "reason", "as_asked", "dtypes", "glob")}
        return {"site": asdict(self.site), **rest}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], specs: Mapping[tuple[str, str, str], KernelSpec]) -> SiteDecision:
        """The decision that :meth:`to_dict` turned into ``data``, with its spec from ``specs``: op, variant, label.

        Raises:
            ValueError: ``specs`` lacks the kernel.
        """
        site = Site(**data["site"])
        key = (site.op_name, site.variant or "", data["kernel"])
        if data["kernel"] != EAGER and key not in specs:
            raise ValueError(f"{data['kernel']} at {site.path or 'the model'} is not among the plan's kernels")
        return cls(site, specs.get(key), data["reason"], data["as_asked"], data["dtypes"], data.get("glob"))


@dataclass(frozen=True)
class OpDecision:
    """What one config field requests, and what was decided at every site of its op.

    ``preset`` names the preset that filled the field; it is ``None`` if the config writes the field.
    """

    op_name: str
    config_field: str
    asked: Any
    preset: str | None
    sites: tuple[SiteDecision, ...]

    @property
    def written(self) -> bool:
        """Whether the config writes the field."""
        return self.preset is None

    @property
    def shown(self) -> str:
        """What is requested, for tables; with the preset's name where a preset filled the field."""
        return f"{self.asked}" + ("" if self.written else f" (preset {self.preset})")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The kernels that are used, the one with the most sites first; only ``eager`` if none is."""
        counts = Counter(decision.kernel for decision in self.sites if decision.bound)
        return tuple(name for name, _ in counts.most_common()) or (EAGER,)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the proofs leave out at bound sites: a line for each kernel and each thing, with the sites' number."""
        counts = Counter((d.kernel, what) for d in self.sites for what in d.left_out)
        return tuple(f"{self.op_name}:{kernel} ({count}): {what}" for (kernel, what), count in counts.items())

    @property
    def left_eager(self) -> tuple[SiteDecision, ...]:
        """The sites where the model's own code runs."""
        return tuple(decision for decision in self.sites if not decision.bound)

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain data."""
        rest = {name: getattr(self, name) for name in ("op_name", "config_field", "asked", "written", "preset")}
        return {**rest, "sites": [decision.to_dict() for decision in self.sites]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], specs: Mapping[tuple[str, str, str], KernelSpec]) -> OpDecision:
        """The decision that :meth:`to_dict` turned into ``data``, with the specs of its kernels from ``specs``."""
        sites = tuple(SiteDecision.from_dict(decision, specs) for decision in data["sites"])
        preset = None if data["written"] else data.get("preset", "unknown")
        return cls(data["op_name"], data["config_field"], data["asked"], preset, sites)
