"""Overrides for torchtitan's configs: its RMSNorm and its SwiGLU on kernels.

torchtitan imports this module where a job names one of its functions under ``override.imports``, and calls the function
for each module that it replaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor
from torch.distributed.tensor import DTensor

from veomni_bridges.libraries import require

require("torchtitan", "0.3", extra="torchtitan")

from torchtitan.config import derive, override  # noqa: E402
from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402

from veomni_bridges.checked_kernels import checked, chosen  # noqa: E402
from veomni_core.errors import BindingError  # noqa: E402


class KernelRMSNorm(RMSNorm):  # type: ignore[misc]
    """torchtitan's RMSNorm on a kernel: ``x[..., H] -> [..., H]``, with the same parameters and states."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):  # type: ignore[misc]
        kernel: str

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._kernel = checked(chosen("rms_norm", _norm(config), config.kernel))

    def forward(self, x: Tensor) -> Tensor:
        return self._kernel(_local(x), self.weight, self.eps)


class KernelFeedForward(FeedForward):  # type: ignore[misc]
    """torchtitan's SwiGLU feed-forward with a kernel between its projections; the same parameters and states."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):  # type: ignore[misc]
        kernel: str

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._kernel = checked(chosen("swiglu_mlp", "standard", config.kernel))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self._kernel(_local(self.w1(x)), self.w3(x)))


@override(  # type: ignore[untyped-decorator]
    target=RMSNorm.Config, exact=True, description="RMSNorm on a kernel of veomni-core's plugins"
)
def rms_norm(config: RMSNorm.Config, kernel: str = "auto") -> KernelRMSNorm.Config:
    """Run RMSNorm on ``kernel``, which passes its contract on this device first, in values and gradients.

    Raises:
        UnknownNameError: no kernel has this name.
        KernelUnavailableError: it can't run here, or ``auto`` finds none.
        ConformanceError: it breaks its contract here.
        BindingError: the norm is over several dimensions, or has no eps.
    """
    if not isinstance(config.normalized_shape, int) or config.eps is None:
        raise BindingError(
            "kernels normalise the last dimension, with an eps: normalized_shape is "
            f"{config.normalized_shape} here, and eps {config.eps}. Leave this norm out of the override"
        )
    return derive(config, KernelRMSNorm.Config, kernel=_said("rms_norm", _norm(config), kernel))


@override(  # type: ignore[untyped-decorator]
    target=FeedForward.Config, exact=True, description="SwiGLU on a kernel of veomni-core's plugins"
)
def swiglu(config: FeedForward.Config, kernel: str = "auto") -> KernelFeedForward.Config:
    """Run SwiGLU on ``kernel``, as :func:`rms_norm` does."""
    return derive(config, KernelFeedForward.Config, kernel=_said("swiglu_mlp", "standard", kernel))


def _norm(config: RMSNorm.Config) -> str:
    """The variant that PyTorch's RMSNorm computes: it rounds once, at the end."""
    return "cast_after" if config.elementwise_affine else "unweighted"


@cache
def _said(op: str, variant: str, name: str) -> str:
    """The name of the kernel, which is checked here: torchtitan builds its modules on the meta device."""
    spec = chosen(op, variant, name)
    checked(spec)
    print(f"torchtitan's {op} runs on {spec}, which has passed its contract on this device")
    return spec.name


def _local(x: Tensor) -> Tensor:
    if isinstance(x, DTensor):
        raise BindingError("kernels were not tested on DTensors in torchtitan: train without tensor parallelism")
    return x
