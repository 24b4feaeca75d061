"""Converters of a plugin that fail, or give other values than they gave shapes: a typed error names the converter."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from veomni_core.errors import CheckpointError
from veomni_tools.checkpoints.converted_files import ConvertedFiles
from veomni_transformers.plugin_models import ConvertedCheckpointTensor


class Wrong:
    """Gives each tensor under its name, but for what a test replaces."""

    def can_handle(self, name):
        return True

    def convert(self, name, tensor):
        return [ConvertedCheckpointTensor(name, tensor)]

    def finalize(self):
        return []


def of_values(change):
    """What gives the tensor for shapes, and ``change`` of it for values."""
    return lambda self, name, t: [ConvertedCheckpointTensor(name, t if t.is_meta else change(t))]


@pytest.mark.parametrize(
    ("method", "code", "words"),
    [
        ("can_handle", lambda self, name: 1 / 0, r"by Wrong: can_handle\('a'\) failed: ZeroDivisionError"),
        ("convert", lambda self, name, t: 1 / 0, "by Wrong: division by zero"),
        ("finalize", lambda self: 1 / 0, "by Wrong: division by zero"),
        ("convert", lambda self, name, t: [(name, t)], "is to give ConvertedCheckpointTensor"),
        ("convert", lambda self, name, t: [ConvertedCheckpointTensor(name, 3)], "is to give ConvertedCheckpointTensor"),
        ("convert", lambda self, name, t: [ConvertedCheckpointTensor(3, t)], "is to give ConvertedCheckpointTensor"),
        ("convert", lambda self, name, t: [ConvertedCheckpointTensor("x", t)], "x is there twice"),
        ("convert", of_values(lambda t: t[:1]), r"a as F32 \[2, 3\] for shapes, and as F32 \[1, 3\] on cpu for values"),
        ("convert", of_values(lambda t: t.half()), r"for shapes, and as F16 \[2, 3\] on cpu for values"),
        ("convert", of_values(lambda t: t.to("meta")), r"for shapes, and as F32 \[2, 3\] on meta for values"),
    ],
)
def test_a_converter_that_is_wrong_is_named(method, code, words, tmp_path, monkeypatch):
    save_file({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(Wrong, method, code)
    with pytest.raises(CheckpointError, match=words):
        ConvertedFiles(tmp_path, Wrong).rows("a")
