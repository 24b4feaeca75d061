"""Kernels for ByteDance's VeOmni, under the names by which its ``ops_implementation`` chooses them.

VeOmni resolves a name, such as ``rms_norm_implementation: veomni_core.triton``, in a registry of the process, and its
slots are shared by all models of a modeling module. What the module computes at a slot is VeOmni's word. The kernel is
checked here: before it is handed out, it passes its op's contract on this device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers.activations import ACT2FN

from veomni_bridges.checked_kernels import Kernel, checked, registry
from veomni_bridges.libraries import require
from veomni_core import HardwareRequirement, KernelSpec
from veomni_core.errors import BindingError

# Of VeOmni's open proposal for entry points veomni.ops_backends (its pull request 1121). It reads this number and the
# attribute VEOMNI_OPS_BACKENDS, which __getattr__ makes when it is asked for.
VEOMNI_PLUGIN_API_VERSION = 1

_PREFIX = "veomni_core."
_SILU = type(ACT2FN["silu"])
_DEVICES = {"any": "any", "cuda": "gpu", "npu": "npu"}  # of the core: of VeOmni


def kernel_specs() -> list[Any]:
    """A ``KernelSpec`` of VeOmni for each kernel that is installed and fits one of its slots.

    Put them into VeOmni's registry before a model is built: ``KERNEL_REGISTRY.register(spec)`` for each. A kernel is
    loaded and checked when a model's slot asks for it. Its gradients are those of the kernel.

    Raises:
        HostError: VeOmni is missing or older than 0.1.12.
        KernelUnavailableError: when a slot asks, if this machine doesn't meet what the kernel needs.
        ConformanceError: when a slot asks, if the kernel breaks its contract here, in values or gradients.
    """
    require("veomni", "0.1.12", extra="veomni")
    from veomni.ops import kernel_registry

    return [
        kernel_registry.KernelSpec(
            name=offer.name,
            op_name=offer.op,
            variant=offer.variant,
            factory=offer.load,
            hardware=kernel_registry.HardwareRequirement(**offer.hardware),
            description=str(offer.spec),
        )
        for offer in _offers().values()
    ]


@dataclass(frozen=True)
class _Slot:
    """Which of our variants a slot of VeOmni computes, and how its call is made into ours."""

    variant: str
    adapt: Callable[[Kernel], Kernel]


@dataclass(frozen=True)
class _Offer:
    """A kernel for a slot of VeOmni."""

    op: str
    variant: str
    slot: _Slot
    spec: KernelSpec
    hardware: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{_PREFIX}{self.spec.name}"

    @property
    def attribute(self) -> str:
        """What stands for the kernel in this module, for the proposal's ``module:attribute``."""
        return f"{self.op}__{self.variant}__{self.spec.name}"

    def load(self) -> Kernel:
        return self.slot.adapt(checked(self.spec))


@cache
def _offers() -> dict[str, _Offer]:
    """The kernels that are offered, by their attribute's name."""
    offers = [
        _Offer(op, variant, slot, spec, hardware)
        for (op, variant), slot in _SLOTS.items()
        for spec in registry().kernels(op, slot.variant)
        if spec.backward and (hardware := _hardware(spec.hardware)) is not None
    ]
    return {offer.attribute: offer for offer in offers}


def _hardware(requirement: HardwareRequirement) -> dict[str, Any] | None:
    """What VeOmni's ``HardwareRequirement`` takes; ``None`` for devices that it doesn't know."""
    for each in (requirement, *requirement.others):
        if each.device_type in _DEVICES:
            return {
                "device_type": _DEVICES[each.device_type],
                "min_compute_capability": each.min_compute_capability,
                "max_compute_capability": each.max_compute_capability,
            }
    return None


def _as_it_is(kernel: Kernel) -> Kernel:
    return kernel


def _of_rotary(kernel: Kernel) -> Kernel:
    def rotate(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
        return kernel(q, k, cos, sin, unsqueeze_dim)

    return rotate


def _of_mlp(kernel: Kernel) -> Kernel:
    def forward(mlp: Any, x: Any) -> Any:
        if not isinstance(mlp.act_fn, _SILU):
            raise BindingError(f"the kernel computes SwiGLU, and the activation of this MLP is {mlp.act_fn}")
        return mlp.down_proj(kernel(mlp.gate_proj(x), mlp.up_proj(x)))

    return forward


# VeOmni's op and variant, which the op has here under the same name. What its modeling code computes there was compared
# by value, in VeOmni 0.1.12: its `unweighted` norm rounds the scale, as DeepSeek-V4 does.
_SLOTS = {
    ("load_balancing_loss", "standard"): _Slot("standard", _as_it_is),
    ("rms_norm", "standard"): _Slot("standard", _as_it_is),
    ("rms_norm", "qwen3_5"): _Slot("offset", _as_it_is),
    ("rms_norm", "unweighted"): _Slot("unweighted_rounded_scale", _as_it_is),
    ("rotary_pos_emb", "full"): _Slot("full", _of_rotary),
    ("rotary_pos_emb", "partial"): _Slot("partial", _of_rotary),
    ("swiglu_mlp", "standard"): _Slot("standard", _of_mlp),
}


def __getattr__(name: str) -> Any:
    """``VEOMNI_OPS_BACKENDS``, and each kernel by the name that it has there."""
    if name == "VEOMNI_OPS_BACKENDS":
        return {"kernels": [_declared(offer) for offer in _offers().values()]}
    if not name.startswith("__") and name in _offers():
        return _offers()[name].load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _declared(offer: _Offer) -> dict[str, Any]:
    return {
        "name": offer.name,
        "op_name": offer.op,
        "variant": offer.variant,
        "factory": f"{__name__}:{offer.attribute}",
        "description": str(offer.spec),
        **{key: value for key, value in offer.hardware.items() if value is not None},
    }
