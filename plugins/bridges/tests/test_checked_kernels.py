"""A kernel is handed out once it has passed its contract here."""

from __future__ import annotations

import pytest
import torch

from veomni_bridges.checked_kernels import checked, chosen
from veomni_core import KernelSpec
from veomni_core.errors import ConformanceError, KernelUnavailableError, UnknownNameError


def without_a_root(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps)


def test_a_kernel_that_breaks_its_contract_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec("right", "rms_norm", "standard", "veomni_ops.rms_norm:standard")
    assert checked(spec)(torch.ones(2, 4), torch.ones(4), 0.0).eq(1).all()
    monkeypatch.setattr("veomni_ops.rms_norm.cast_after", without_a_root)
    with pytest.raises(ConformanceError, match="rms_norm/standard:wrong on cpu in .* breaks its contract"):
        checked(KernelSpec("wrong", "rms_norm", "standard", "veomni_ops.rms_norm:cast_after"))


def test_auto_takes_the_highest_preference_that_can_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("which kernel can run is asked of a CPU")
    assert chosen("rms_norm", "cast_after", "auto").name == "torch"
    with pytest.raises(KernelUnavailableError, match="no kernel of rotary_pos_emb_vision/full can train on"):
        chosen("rotary_pos_emb_vision", "full", "auto")
    with pytest.raises(UnknownNameError, match="tirton"):
        chosen("rms_norm", "cast_after", "tirton")
    with pytest.raises(KernelUnavailableError, match="cast_after:triton can't run here: needs device type cuda"):
        checked(chosen("rms_norm", "cast_after", "triton"))
