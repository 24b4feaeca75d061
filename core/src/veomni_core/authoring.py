"""What a plugin's rules, contracts and kernels are made of. Imports torch: a plugin's description must not import it.

- A contract: ``Contract``, ``Sample``, ``Tolerance``, ``Draw``, ``leaf``, ``compute_dtype``, and ``check_kernel``.
- A contract of calls that several ranks make together: ``RankContract`` with ``RankSample``. ``ExpertRanks`` is what a
  kernel of token_dispatch is told of them.
- A rule that finds sites: ``Site``, ``SiteLocator`` (with ``installs_eager`` an ``EagerSiteLocator``) and ``Kernel``.
  For an op that is a module, ``ModuleLocator`` walks over the model and asks a subclass for a ``Proof`` of each kind of
  module. ``probe`` runs a module's code on small inputs and compares values, gradients and roundings, as the core's own
  rules do. ``with_globals`` clones a function, and the clone sees other globals. ``install`` yields a ``Change``:
  an ``AttributeChange``, a ``ForwardChange``, or one of your own.
- A core rule's proof over a variant or a layout of your own: ``NormModules``, ``GatedNormModules`` and
  ``GatedMlpModules``, for a subclass with other ``contracts``; ``ExpertsModules``, for one with other ``layouts``, each
  an ``ExpertLayout``.
- A kernel: ``first_derivatives_only``, ``aligned``, ``autocast_dtype`` and ``product_operands``.
"""

from veomni_core.changes.change import AttributeChange, Change, ForwardChange
from veomni_core.kernels import ExpertRanks, aligned, autocast_dtype, first_derivatives_only, product_operands
from veomni_core.ops.contract import Contract, Draw, Sample, Tolerance, compute_dtype, leaf
from veomni_core.ops.rank_contract import RankContract, RankSample
from veomni_core.sites.experts.locator import ExpertsModules
from veomni_core.sites.forwards.expert_layouts import ExpertLayout
from veomni_core.sites.functions import with_globals
from veomni_core.sites.gated_mlps.locator import GatedMlpModules
from veomni_core.sites.module_locator import ModuleLocator
from veomni_core.sites.norms.rms_norm import NormModules
from veomni_core.sites.norms.rms_norm_gated import GatedNormModules
from veomni_core.sites.proofs import probe
from veomni_core.sites.proofs.proof import Proof
from veomni_core.sites.site import EagerSiteLocator, Kernel, Site, SiteLocator
from veomni_core.testing import check_kernel

__all__ = [
    "AttributeChange",
    "Change",
    "Contract",
    "Draw",
    "EagerSiteLocator",
    "ExpertLayout",
    "ExpertRanks",
    "ExpertsModules",
    "ForwardChange",
    "GatedMlpModules",
    "GatedNormModules",
    "Kernel",
    "ModuleLocator",
    "NormModules",
    "Proof",
    "RankContract",
    "RankSample",
    "Sample",
    "Site",
    "SiteLocator",
    "Tolerance",
    "aligned",
    "autocast_dtype",
    "check_kernel",
    "compute_dtype",
    "first_derivatives_only",
    "leaf",
    "probe",
    "product_operands",
    "with_globals",
]
