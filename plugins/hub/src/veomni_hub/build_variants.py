"""The build variants of a kernel: their digests, and which one is for this machine by the rules of ``kernels``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernels import VariantRejected
from kernels.variants import parse_variant, resolve_variants

from veomni_core.errors import ConfigError


@dataclass(frozen=True)
class Fit:
    """Which of some build variants this machine can load.

    Attributes:
        names: those that it can load, the best first.
        refused: why it can't load the others, by name.
    """

    names: tuple[str, ...]
    refused: dict[str, str]

    @classmethod
    def of(cls, names: Iterable[str]) -> Fit:
        """How the build variants ``names`` fit this machine and its PyTorch. Imports torch."""
        variants, refused = [], {}
        for name in sorted(names):
            try:
                variants.append(parse_variant(name))
            except ValueError as error:
                refused[name] = f"is not a build variant's name ({error})"
        fitting, decisions = resolve_variants(variants)
        refused |= {each.variant.variant_str: each.reason for each in decisions if isinstance(each, VariantRejected)}
        return cls(tuple(each.variant_str for each in fitting), refused)

    def says_of(self, name: str) -> str:
        """Whether this machine can load ``name``, for a table."""
        if name in self.refused:
            return f"no: {self.refused[name]}"
        return "yes, the best" if name == self.names[0] else "yes"

    def why_none(self) -> str:
        """For messages: each name with the reason against it."""
        return "; ".join(f"{name}: {why}" for name, why in self.refused.items()) or "there is none"


def variants_in(folder: Path) -> dict[str, Path]:
    """The folders of the build variants in ``folder``, which holds ``build/``, by their names."""
    build = folder / "build"
    return {each.name: each for each in sorted(build.iterdir()) if each.is_dir()} if build.is_dir() else {}


def digest_of(variant: Path) -> str:
    """The SHA-256 of every file of a build variant, with its path; of all but bytecode, which Python writes itself.

    Raises:
        ConfigError: a folder in it is a link, whose files could be imported without being part of the digest.
    """
    total = hashlib.sha256()
    for path in sorted(variant.rglob("*")):
        relative = path.relative_to(variant)
        if path.is_dir() and path.is_symlink():
            raise ConfigError(f"{path} is a link to a folder; put the folder itself there")
        if path.is_dir() or "__pycache__" in relative.parts:
            continue
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{relative.as_posix()}\0{content}\n".encode())
    return f"sha256:{total.hexdigest()}"
