"""Writes modeling code that people can read: a model's own code from transformers, with patches in it."""

from veomni_patchgen.config import External, Patch, PatchConfig, create_patch_from_external
from veomni_patchgen.errors import PatchError
from veomni_patchgen.generate import Generated, generate

__all__ = [
    "External",
    "Generated",
    "Patch",
    "PatchConfig",
    "PatchError",
    "create_patch_from_external",
    "generate",
]
