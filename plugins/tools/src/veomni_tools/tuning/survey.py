"""What there is to measure in a model: each kind of site once, with the kernels that could run there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.planning.choice import AUTO, Requested
from veomni_core.planning.config import OpsConfig
from veomni_core.planning.evidence import evidence_on
from veomni_core.planning.selection import Selection
from veomni_core.sites.find import search
from veomni_core.sites.site import Site
from veomni_tools.profiles.site_kind import SiteKind


@dataclass(frozen=True)
class Surveyed:
    """One kind of site of a model.

    Attributes:
        kind: the kind.
        site: the first site of that kind.
        count: how many there are.
        kernels: those that could run there, whatever ``veomni verify`` says of them.
    """

    kind: SiteKind
    site: Site
    count: int
    kernels: tuple[KernelSpec, ...]


class Survey:
    """Surveys models for one config, hardware and autocast dtype."""

    def __init__(self, ops: OpsConfig, hardware: Hardware, autocast: str | None) -> None:
        self.ops, self.hardware, self._autocast = ops, hardware, autocast

    def of(self, model: Any) -> tuple[Surveyed, ...]:
        """The kinds of proven sites in ``model``, in the order of ops and paths.

        An op that runs on request alone is left out, unless the config asks for it.
        """
        selection, found = self._selection(), dict[SiteKind, Surveyed]()
        for site in search(model, self.ops.registry).sites:
            on_request = self.ops.registry.op(site.op_name).on_request
            if site.variant is None or (on_request and not self.ops.choices[site.op_name].written):
                continue
            kind = SiteKind.of(site, selection.dtypes_at(site.op_name, site))
            if kind in found:
                found[kind] = replace(found[kind], count=found[kind].count + 1)
            else:
                found[kind] = Surveyed(kind, site, 1, selection.could_run(site.op_name, site))
        return tuple(found.values())

    def by_rank(self, surveyed: Surveyed) -> str:
        """What ``auto`` takes there by declared preferences: the kernel's name, or ``eager``."""
        return self._selection().choose(surveyed.kind.op_name, (Requested(AUTO),), surveyed.site).kernel

    def _selection(self) -> Selection:
        return Selection(
            *(self.ops.registry, self.hardware, {}, self._autocast),
            evidence=evidence_on(self.hardware),
            require=self.ops.require,
        )
