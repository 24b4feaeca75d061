"""Names that a command line gives, looked up; what isn't known is an error with the nearest name."""

from __future__ import annotations

from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConfigError, UnknownNameError, did_you_mean

DEVICES = ("cpu", "cuda", "rocm")  # the types that the core detects


def find_op(registry: Registry, name: str) -> OpSpec:
    """The op called ``name``, or the one whose config field is ``name``.

    Raises:
        UnknownNameError: there is neither.
    """
    by_field = {op.config_field: op for op in registry.ops.values()}
    return by_field[name] if name in by_field else registry.op(name)


def check_device(registry: Registry, name: str) -> None:
    """Refuse a ``--device`` whose type (``cuda`` of ``cuda:1``) neither the core nor a plugin knows.

    Raises:
        UnknownNameError: the type is unknown.
    """
    kind, known = name.partition(":")[0], (*DEVICES, *registry.devices)
    if kind not in known:
        raise UnknownNameError(f"--device {name}: there is no device type {kind!r}. {did_you_mean(kind, known)}")


def compiled_gpu(registry: Registry, name: str) -> Hardware:
    """The GPU called ``name`` that Triton's kernels are to be compiled for: ``sm90``, ``h200``, ``mi300x``, ...

    Raises:
        UnknownNameError: no hardware has this name.
        ConfigError: Triton compiles for no such hardware.
    """
    hardware = registry.named_hardware(name)
    if hardware.device_type != "rocm" and hardware.compute_capability is None:
        raise ConfigError(
            f"{name} is {hardware.describe()}, and Triton's kernels are compiled for GPUs of NVIDIA and AMD: write "
            "sm90, h200, mi300x"
        )
    return hardware
