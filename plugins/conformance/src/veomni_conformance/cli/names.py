"""Names of ops, plugins, kernels, devices and dtypes on the command line: which are known, and what is completed."""

from __future__ import annotations

from veomni_core.cli.output import begin_with
from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import DTYPES
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConfigError, UnknownNameError, did_you_mean

DEVICES = ("cpu", "cuda", "rocm")  # the types that the core detects


def complete_op(incomplete: str) -> list[str]:
    """The ops and their config fields."""
    ops = discover().ops.values()
    return begin_with(incomplete, (name for op in ops for name in (op.name, op.config_field)))


def complete_plugin(incomplete: str) -> list[str]:
    """The installed plugins, without those that define ops: they have no kernels."""
    return begin_with(incomplete, (record.name for record in discover().plugins if not record.defines))


def complete_kernel(incomplete: str) -> list[str]:
    """The kernels of all plugins: which of them the command line names isn't known before it is complete."""
    return begin_with(incomplete, (spec.name for record in discover().plugins for spec in record.kernels))


def complete_device(incomplete: str) -> list[str]:
    """The types of devices."""
    return begin_with(incomplete, ["cpu", "cuda", *discover().devices])


def complete_dtype(incomplete: str) -> list[str]:
    """The dtypes that kernels are for."""
    return begin_with(incomplete, DTYPES)


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
