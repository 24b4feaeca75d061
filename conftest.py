"""What every distribution's tests share: tests that need a device which isn't here are skipped, with the reason."""

from __future__ import annotations

import pytest


def _missing_device(marker: str) -> str | None:
    import torch

    if marker == "gpu":
        return None if torch.cuda.is_available() else "needs a CUDA GPU; torch sees none here"
    return None if hasattr(torch, "npu") and torch.npu.is_available() else "needs an Ascend NPU; torch sees none here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker in ("gpu", "npu"):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = _missing_device(marker) if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
