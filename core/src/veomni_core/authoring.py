"""What rules are made of: sites, locators, changes. Imports torch: a plugin's description must not import it.

- A rule that finds sites: ``Site``, ``SiteLocator`` (with ``installs_eager`` an ``EagerSiteLocator``) and ``Kernel``.
  Its ``install`` yields a ``Change``: an ``AttributeChange``, a ``ForwardChange``, or one of your own.
- A rule that changes a whole model: ``WholeModelRule``. How a divided model is read: ``ModelView``.

What kernels share is in :mod:`veomni_core.kernels`. Contracts and checks are in :mod:`veomni_conformance`, and proofs
over transformers' models in :mod:`veomni_transformers.authoring`.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from veomni_core.binding.model_rules import WholeModelRule
from veomni_core.changes.change import AttributeChange, Change, ForwardChange
from veomni_core.sites.model_view import ModelView
from veomni_core.sites.site import EagerSiteLocator, Kernel, Site, SiteLocator

__all__ = [
    "AttributeChange",
    "Change",
    "EagerSiteLocator",
    "ForwardChange",
    "Kernel",
    "ModelView",
    "Site",
    "SiteLocator",
    "WholeModelRule",
]

# Names that were here before they got homes of their own; to be removed after one release.
_MOVED = {
    "veomni_core.kernels": (
        *("ExpertRanks", "aligned", "autocast_dtype", "first_derivatives_only", "product_operands"),
    ),
    "veomni_conformance": (
        *("Contract", "Draw", "RankContract", "RankSample", "Sample", "Tolerance", "check_kernel", "compute_dtype"),
        "leaf",
    ),
    "veomni_transformers.authoring": (
        *("ExpertLayout", "ExpertsModules", "GatedMlpModules", "GatedNormModules", "ModuleLocator", "NormModules"),
        *("Proof", "probe", "with_globals"),
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _MOVED.items():
        if name in names:
            warnings.warn(
                f"veomni_core.authoring.{name} is now {module}.{name}; the old name goes with the next release",
                FutureWarning,
                stacklevel=2,
            )
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'veomni_core.authoring' has no attribute {name!r}")
