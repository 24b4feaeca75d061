"""A small package with two modeling files, and patches of them, as files that a test writes."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from veomni_patchgen.config import PatchConfig
from veomni_patchgen.generation import Generated, generate
from veomni_patchgen.patch_file import configs_in, load_patches

DENSE = """
# Copyright of the planted model
from dataclasses import dataclass

from .activations import ACTIVATIONS, unused_before
from .tools import decorated, gone_with_the_talker


@dataclass
class DenseOutput:
    hidden: object = None
    cache: object = None


def rotate_half(x):
    return -x


def rotate(q, k):
    return rotate_half(q), rotate_half(k)


class DenseNorm:
    def __init__(self, width, eps=1.0):
        self.width, self.eps = width, eps

    @decorated
    def forward(self, x):
        y = x * self.width
        return y + self.eps


class DenseLayer(DenseNorm):
    def __init__(self, width):
        super().__init__(width)
        self.deep = True


class DenseTwin(DenseLayer): ...


class DenseTalker:
    voice = gone_with_the_talker


class DenseBase:
    def _init_weights(self, module):
        if isinstance(module, DenseTalker):
            return None
        return module


class DenseModel(DenseBase):
    _no_split_modules = ["DenseLayer"]

    def __init__(self):
        self.norm = DenseNorm(2)

    def forward(self, x):
        q, k = rotate(x, ACTIVATIONS)
        return DenseOutput(hidden=self.norm.forward(q), cache=k)


__all__ = ["DenseModel", "DenseTalker"]
"""
MOE = DENSE.replace("Dense", "Sparse").replace(
    "    cache: object = None\n", "    cache: object = None\n    router_logits: object = None\n"
)
_HEAD = """
from veomni_patchgen import PatchConfig, create_patch_from_external

config = PatchConfig(source_module="planted.modeling_dense", target_file="patched_dense.py")
"""


class Planted:
    """The package in ``folder``, which is in Python's path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = folder / "planted"
        package.mkdir()
        files = {
            "__init__": "",
            "activations": "ACTIVATIONS, unused_before = 3, 4\n",
            "tools": "gone_with_the_talker = 1\ndef decorated(f):\n    f.decorated = True\n    return f\n",
            "modeling_dense": DENSE,
            "modeling_sparse": MOE,
        }
        for name, text in files.items():
            (package / f"{name}.py").write_text(text)

    def change(self, old: str, new: str, name: str = "modeling_dense") -> None:
        """Change upstream."""
        path = self.folder / "planted" / f"{name}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def patches(self, code: str, name: str = "patches", head: str = _HEAD) -> ModuleType:
        """The module of patches with ``code`` below its config."""
        path = self.folder / f"{name}.py"
        path.write_text(head + textwrap.dedent(code))
        return load_patches(str(path))

    def config(self, code: str, name: str = "patches", head: str = _HEAD) -> PatchConfig:
        return configs_in(self.patches(code, name, head))["config"]

    def generate(self, code: str, name: str = "patches", head: str = _HEAD) -> Generated:
        return generate(self.config(code, name, head))


def run(generated: Generated) -> dict[str, Any]:
    """What the generated file defines when it is run."""
    module = ModuleType("planted.generated")
    sys.modules[module.__name__] = module  # where dataclasses look for it
    exec(compile(generated.text, generated.config.target_file, "exec"), vars(module))
    return vars(module)
