"""What modules that look like a known op are found to be."""

from __future__ import annotations

from torch import nn

from counting_kernels import counting_registry
from veomni_core import Site, find_sites

REGISTRY = counting_registry("one")


def sites(op: str, *modules: nn.Module) -> list[Site]:
    return [site for site in find_sites(nn.Sequential(*modules), REGISTRY) if site.op_name == op]


def variants(op: str, *modules: nn.Module) -> list[str | None]:
    return [site.variant for site in sites(op, *modules)]
