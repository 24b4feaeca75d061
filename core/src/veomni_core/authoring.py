"""What rules are made of: sites, locators, changes. Imports torch: a plugin's description must not import it.

- A rule that finds sites: ``Site``, ``SiteLocator`` (with ``installs_eager`` an ``EagerSiteLocator``) and ``Kernel``.
  Its ``install`` yields a ``Change``: an ``AttributeChange``, a ``ForwardChange``, or one of your own.
- A rule that changes a whole model: ``WholeModelRule``. How a divided model is read: ``ModelView``.

What kernels share is in :mod:`veomni_core.kernels`. Contracts and checks are in :mod:`veomni_conformance`, and proofs
over transformers' models in :mod:`veomni_transformers.authoring`.
"""

from __future__ import annotations

from veomni_core.binding.model_rules import WholeModelRule
from veomni_core.changes.change import AttributeChange, Change, ForwardChange
from veomni_core.moved_names import moved
from veomni_core.sites.model_view import ModelView
from veomni_core.sites.site import EagerSiteLocator, Kernel, Site, SiteLocator

__all__ = ["AttributeChange", "Change", "EagerSiteLocator", "ForwardChange", "Kernel", "ModelView", "Site"]
__all__ += ["SiteLocator", "WholeModelRule"]

__getattr__ = moved(
    __name__,
    {
        "veomni_core.kernels": ("aligned", "autocast_dtype", "first_derivatives_only", "product_operands"),
        "veomni_ops.expert_ranks": ("ExpertRanks",),
        "veomni_conformance": (
            *("Contract", "Draw", "RankContract", "RankSample", "Sample", "Tolerance", "check_kernel", "compute_dtype"),
            "leaf",
        ),
        "veomni_transformers.authoring": (
            *("ExpertLayout", "ExpertsModules", "GatedMlpModules", "GatedNormModules", "ModuleLocator", "NormModules"),
            *("Proof", "probe", "with_globals"),
        ),
    },
)
