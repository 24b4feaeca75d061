"""What a rule over transformers' models is made of, as the rules here are. Imports torch and transformers.

- For an op that is a module, ``ModuleLocator`` walks over the model and calls a subclass for a ``Proof`` of each kind
  of module. ``probe`` runs a module's code on small inputs and compares values, gradients and roundings.
  ``with_globals`` clones a function, and the clone sees other globals.
- A proof over a variant or a layout of your own: ``NormModules``, ``GatedNormModules`` and ``GatedMlpModules``, for a
  subclass with other ``contracts``; ``ExpertsModules``, for one with other ``layouts``, each an ``ExpertLayout``.
"""

from veomni_transformers.experts.locator import ExpertsModules
from veomni_transformers.forwards.expert_layouts import ExpertLayout
from veomni_transformers.gated_mlps.locator import GatedMlpModules
from veomni_transformers.norms.rms_norm import NormModules
from veomni_transformers.norms.rms_norm_gated import GatedNormModules
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import with_globals
from veomni_transformers.proving.module_locator import ModuleLocator
from veomni_transformers.proving.proof import Proof

__all__ = [
    "ExpertLayout",
    "ExpertsModules",
    "GatedMlpModules",
    "GatedNormModules",
    "ModuleLocator",
    "NormModules",
    "Proof",
    "probe",
    "with_globals",
]
