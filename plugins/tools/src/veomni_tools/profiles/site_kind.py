"""What makes two sites of a model alike, so that one measurement is for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from veomni_core.sites.site import Site


@dataclass(frozen=True)
class SiteKind:
    """The properties of a site on which it depends how long each kernel takes there, in one model and for one batch.

    Attributes:
        op_name, variant: what the site computes.
        where: the site's path, with ``*`` for each number in it: the same place in every layer.
        dtypes: in which its inputs may arrive.
        sizes: its widths and counts, sorted by name.
        needs: the features that a kernel must have there.
        own: what runs there when nothing is bound.

    Example:
        >>> norm = Site("rms_norm", "model.layers.7.norm", "norms", "standard", "proven", sizes={"width": (64,)})
        >>> SiteKind.of(norm, ("bfloat16",)).where
        'model.layers.*.norm'
    """

    op_name: str
    variant: str
    where: str
    dtypes: tuple[str, ...]
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    needs: tuple[str, ...]
    own: str

    @classmethod
    def of(cls, site: Site, dtypes: tuple[str, ...]) -> SiteKind:
        """The kind of ``site``, whose inputs arrive in ``dtypes``."""
        where = ".".join("*" if part.isdigit() else part for part in site.path.split("."))
        sizes = tuple(sorted(site.sizes.items()))
        return cls(site.op_name, site.variant or "", where, tuple(dtypes), sizes, tuple(sorted(site.needs)), site.own)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SiteKind:
        """The kind that :meth:`to_dict` turned into ``data``."""
        sizes = tuple((str(name), tuple(map(int, values))) for name, values in data["sizes"])
        named = {name: str(data[name]) for name in ("op_name", "variant", "where", "own")}
        return cls(**named, sizes=sizes, dtypes=tuple(data["dtypes"]), needs=tuple(data["needs"]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.op_name}/{self.variant} at {self.where or 'the model'}"
