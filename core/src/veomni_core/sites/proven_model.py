"""What a plan's sites were proven in: the model as it was, and the code that the proofs of bound sites have read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from veomni_core.changes.bound_subclass import eager_class
from veomni_core.changes.code_places import CodePlace
from veomni_core.descriptions.spec import SiteRule
from veomni_core.sites.find import SearchResult, locator_of
from veomni_core.sites.model_view import view_of
from veomni_core.sites.site import Site, SiteLocator

if TYPE_CHECKING:
    from veomni_core.discovery.registry import Registry


class CodeRead:
    """The places whose code proofs have read, each with who read it: ``the proof of rms_norm``, and module paths.

    Args:
        former: what another has, which this one begins with.
    """

    def __init__(self, former: CodeRead | None = None) -> None:
        read = former._read if former else {}
        self._read: dict[tuple[str, int], tuple[tuple[CodePlace, ...], list[str]]] = {
            key: (places, [*paths]) for key, (places, paths) in read.items()
        }

    def add_site(self, model: nn.Module, site: Site, locator: SiteLocator) -> None:
        """Add the code that a kernel at ``site`` stands in for; before the site is changed."""
        read = getattr(locator, "code_read", None)
        places = read(model, site) if read else forward_of(model.get_submodule(site.path))
        self.add(places, f"the proof of {site.op_name}", site.path)

    def add(self, places: tuple[CodePlace, ...], reader: str, path: str) -> None:
        """Add ``places``, which ``reader`` has read for the module at ``path``."""
        self._read.setdefault((reader, id(places)), (places, []))[1].append(path or "the model")

    def __iter__(self) -> Iterator[tuple[str, tuple[CodePlace, ...], list[str]]]:
        for (reader, _), (places, paths) in self._read.items():
            yield reader, places, paths

    @property
    def replaced(self) -> bool:
        """Whether other code was put into one of the places since."""
        places = {place.key: place for places, _ in self._read.values() for place in places}
        return any(place.replaced() for place in places.values())


def forward_of(module: nn.Module) -> tuple[CodePlace, ...]:
    """The place of the forward that ``module`` has of its own class."""
    kind = eager_class(type(module))
    return (CodePlace(kind, "forward", f"{kind.__qualname__}.forward"),)


class ProvenModel:
    """Says whether a model is still as it was searched, at a fraction of another search. It goes into no file.

    Args:
        model: the model that was searched.
        found: what was found.
        bound: the sites that a plan gives kernels to.
        registry: whose rules searched.
    """

    def __init__(self, model: nn.Module, found: SearchResult, bound: Iterable[Site], registry: Registry) -> None:
        self.registry, self.code = registry, CodeRead()
        self._description, self._sites = found.description, found.sites
        locators: dict[str, SiteLocator] = {}
        rules: dict[str, SiteRule] = {rule.name: rule for rule in registry.site_rules}
        for site in bound:
            if site.rule not in locators:
                locators[site.rule] = found.locators.get(site.rule) or locator_of(rules[site.rule])
            self.code.add_site(model, site, locators[site.rule])

    def is_still(self, model: nn.Module, sites: Iterable[Site], registry: Registry) -> bool:
        """Whether a search of ``model`` would find ``sites``, all of which it found before. False if that is unknown.

        The model is compared by content, and the code of the bound sites as it was read.
        """
        known = {id(site) for site in self._sites}
        return (
            registry is self.registry
            and all(id(site) in known for site in sites)
            and not self.code.replaced
            and (described := view_of(model, registry).description()) is not None
            and bool(described == self._description)
        )

    def __reduce__(self) -> Any:
        return _nothing, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ProvenModel:
        return self


def _nothing() -> None:
    """What a process that reads a plan of another one knows of the model."""
