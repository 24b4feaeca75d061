"""Declares the kernels to veomni-core. Imports neither torch nor a library."""

from __future__ import annotations

from veomni_core import HardwareRequirement, KernelSpec, Suspicion, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

# Below 0.7: the plugin copies functions below fla's public ones, which a next release may arrange otherwise. fla-core
# requires neither torch nor triton, and without einops it does not import.
_FLA = ("fla-core>=0.6,<0.7", "triton>=3.3", "einops")
_FLA_KDA = ("fla-core>=0.6,<0.7", "triton>=3.4", "einops")  # 3.3.1 doesn't compile its backward
_HALF = ("bfloat16", "float16")  # products of float32 would be TF32
# What auto takes: before plain PyTorch (10), behind veomni-triton (60). 0: not measured here, or dearer for Python.
_PREFERRED, _ON_REQUEST = 50, 0
_NO_BACKENDS = "whatever FLA_* backends the environment names"


def _gpu(*packages: str) -> HardwareRequirement:
    return HardwareRequirement("cuda", min_compute_capability=80, packages=packages)


_FLASH_QLA = HardwareRequirement(
    "cuda", min_compute_capability=90, max_compute_capability=103, packages=("flash-qla>=0.1.3,<0.2",)
)
_HOPPER = Suspicion(
    HardwareRequirement("cuda", min_compute_capability=90, max_compute_capability=90, packages=("triton>=3.4,<3.8",)),
    "gradients of gated delta rules were wrong on Hopper with Triton 3.4 to 3.7.0 (fla#640, #826, #984), and with "
    "3.7.1 under some of the launches among which fla searches",
)
_BLACKWELL = Suspicion(
    HardwareRequirement("cuda", min_compute_capability=100),
    "gradients of gated delta rules were NaN on Blackwell (fla#913)",
)


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """The kernels of flash-linear-attention, FlashQLA, causal-conv1d and mamba-ssm."""
    return [
        _delta_rule("chunk_gated_delta_rule:fla", f"fla's Triton kernels throughout, {_NO_BACKENDS}", _FLA),
        _delta_rule(
            "chunk_gated_delta_rule:fla_tilelang",
            f"the same, with fla's TileLang kernel in the backward, {_NO_BACKENDS}",
            (*_FLA, "tilelang"),
            preference=_PREFERRED - 1,
        ),
        KernelSpec(
            name="flash_qla",
            op_name="chunk_gated_delta_rule",
            variant="standard",
            factory="veomni_fla.chunk_gated_delta_rule:flash_qla",
            hardware=_FLASH_QLA,
            description="FlashQLA's TileLang kernels, fused and specialised by warp groups",
            preference=_ON_REQUEST,
            dtypes=_HALF,
            can_run="veomni_fla.limits:flash_qla",
        ),
        _delta_rule("kda:fla", f"fla's Triton kernels throughout, {_NO_BACKENDS}", _FLA_KDA),
        KernelSpec(
            name="fla",
            op_name="causal_conv1d",
            variant="standard",
            factory="veomni_fla.causal_conv1d:fla",
            hardware=_gpu(*_FLA),
            description=f"fla's Triton kernels, {_NO_BACKENDS}; packed rows wait for the device",
            preference=_PREFERRED,
            features=("any_width",),
        ),
        KernelSpec(
            name="causal_conv1d",
            op_name="causal_conv1d",
            variant="standard",
            factory="veomni_fla.causal_conv1d:causal_conv1d",
            hardware=_gpu("causal-conv1d>=1.6,<2"),
            description="the CUDA kernels of the package causal-conv1d, for widths of 2 to 4",
            preference=_ON_REQUEST,
            deterministic=False,  # the gradients of weight and bias are summed by atomics
        ),
        KernelSpec(
            name="fla",
            op_name="rms_norm_gated",
            variant="sigmoid",
            factory="veomni_fla.rms_norm_gated:sigmoid",
            hardware=_gpu(*_FLA),
            description=f"one of fla's Triton kernels forward and one backward, {_NO_BACKENDS}",
            preference=_PREFERRED,
            can_run="veomni_fla.limits:fla_norm",
        ),
        KernelSpec(
            name="mamba_ssm",
            op_name="mamba2_scan",
            variant="standard",
            factory="veomni_fla.mamba2_scan:mamba_ssm",
            hardware=_gpu("mamba-ssm>=2.3,<3"),
            description="the Triton kernels of the package mamba-ssm, in chunks of 256",
            preference=_ON_REQUEST,
            deterministic=False,  # the gradients of dt and A are summed by atomics
            dtypes=_HALF,
        ),
    ]


def _delta_rule(kernel: str, description: str, packages: tuple[str, ...], preference: int = _PREFERRED) -> KernelSpec:
    """A delta rule by fla: ``kernel`` is ``op:name``."""
    op_name, _, name = kernel.partition(":")
    return KernelSpec(
        name=name,
        op_name=op_name,
        variant="standard",
        factory=f"veomni_fla.{op_name}:{name}",
        hardware=_gpu(*packages),
        description=description,
        dtypes=("bfloat16",),  # fla multiplies what has decayed in TF32, which cuts off what float16 has
        can_run="veomni_fla.limits:fla_delta_rule",
        features=("wide_heads",),
        suspicions=(_HOPPER, _BLACKWELL),
        preference=preference,
    )
