"""Modules that look like an RMS norm and compute something else: none may be bound as what it isn't."""

from __future__ import annotations

import pytest
import torch
from lookalikes import variants
from torch import nn

from veomni_core import find_sites


class AnRMSNorm(nn.Module):
    """The Llama norm, to be varied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.variance_epsilon = 1e-6
        self.steps, self.flag = 0, True

    def forward(self, x):
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normalised.to(x.dtype)


class RoundsTwice(AnRMSNorm):
    def forward(self, x):
        return (self.weight.to(x.dtype) * super().forward(x)) / self.weight.to(x.dtype)


class RoundsTheWeight(AnRMSNorm):
    def forward(self, x):
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.to(x.dtype).float() * normalised).to(x.dtype)


class EpsilonOutsideTheRoot(AnRMSNorm):
    def forward(self, x):
        wide = x.float()
        normalised = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        return self.weight * normalised.to(x.dtype)


class AnotherEpsilon(AnRMSNorm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Scaled(AnRMSNorm):
    def forward(self, x):
        return super().forward(x) * 1.01


class Clamped(AnRMSNorm):
    def forward(self, x):
        return super().forward(x).clamp(-3, 3)


class Centred(AnRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class SumOfSquares(AnRMSNorm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class DependsOnABuffer(AnRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(24))

    def forward(self, x):
        return super().forward(x) * self.scale.to(x.dtype)


class StopsTheGradient(AnRMSNorm):
    def forward(self, x):
        return self.weight * (super().forward(x) / self.weight).detach().to(x.dtype)


class Detached(AnRMSNorm):
    def forward(self, x):
        return super().forward(x).detach()


class AnotherShape(AnRMSNorm):
    def forward(self, x):
        return super().forward(x)[..., :2]


class NegatedRMSNorm(AnRMSNorm):
    def forward(self, x):
        return -super().forward(x)


class NotAnRMSNorm(nn.LayerNorm):
    """A layer norm under the other name."""

    def __init__(self) -> None:
        super().__init__(24, bias=False)


NORMS = [
    RoundsTwice,
    RoundsTheWeight,
    EpsilonOutsideTheRoot,
    AnotherEpsilon,
    Scaled,
    Clamped,
    Centred,
    SumOfSquares,
    DependsOnABuffer,
    StopsTheGradient,
    Detached,
    AnotherShape,
    NegatedRMSNorm,
    NotAnRMSNorm,
]


def test_the_norm_that_the_others_vary_is_the_standard_one():
    assert variants("rms_norm", AnRMSNorm()) == ["standard"]


@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind):
    kind.__name__ = f"{kind.__name__}RMSNorm"  # the name is what draws attention to a module, and proves nothing
    assert variants("rms_norm", kind()) == [None]


@pytest.mark.parametrize("settings", [(False, True), (100, 3)], ids=["a flag", "a count"])
def test_modules_that_differ_in_a_setting_are_proven_apart(settings):
    class Warming(AnRMSNorm):
        def forward(self, x):
            cold = self.setting is True or (self.setting is not False and self.setting < 10)
            return super().forward(x) * (0.5 if cold else 1.0)

    one, other = Warming(), Warming()
    one.setting, other.setting = settings
    Warming.__name__ = "WarmingRMSNorm"
    assert variants("rms_norm", one, other) == ["standard", None]


def test_a_kernel_gets_the_epsilon_that_was_proven():
    class ReadsEps(AnRMSNorm):
        def forward(self, x):
            wide = x.float()
            normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * normalised.to(x.dtype)

    ReadsEps.__name__ = "ReadsEpsRMSNorm"
    norms = nn.Sequential(ReadsEps(), ReadsEps())
    norms[0].eps = norms[1].eps = 1e-6
    norms[1].variance_epsilon = 1e-2  # nothing reads it
    sites = find_sites(norms)
    assert [(site.variant, site.detail["eps"]) for site in sites] == [("standard", 1e-6)] * 2
