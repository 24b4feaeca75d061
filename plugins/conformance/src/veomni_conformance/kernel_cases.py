"""The kernels of a plugin that tests or ``veomni verify`` check: one case for each kernel and dtype. No torch yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from veomni_conformance.requested_device import device_here
from veomni_core.descriptions.hardware import ANY_DEVICE, Hardware
from veomni_core.descriptions.kernel_spec import DTYPES, KernelSpec
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import PluginRecord, Registry
from veomni_core.errors import PluginError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from veomni_conformance.report import ConformanceReport


@dataclass(frozen=True)
class CheckRequest:
    """What is to be checked.

    Args:
        plugin: the plugin's name or its distribution's.
        device: where, as torch names it; what this machine has if it is ``None``.
        dtypes: only these dtypes; all that a kernel declares if it is empty.
        kernels: only these kernels, by name or as ``op/variant:name``; all if it is empty.
        triton_interpreter: on a machine without an accelerator, check kernels for GPUs in Triton's interpreter.
        expected_failures: why a kernel is known to fail, by kernel (``op/variant:name``) or by case
            (``op/variant:name-dtype``).
    """

    plugin: str
    device: str | None = None
    dtypes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    triton_interpreter: bool = False
    expected_failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelCase:
    """One kernel to check in one dtype.

    Attributes:
        spec, op: the kernel and its op.
        device, dtype: where and in which dtype.
        skip: why it can't be checked here; empty if it can.
        interpreted: whether Triton's interpreter runs it.
        expected: why it is expected to fail; empty if it must pass.
        suspected: what was seen of it on such machines, where it may fail or pass; else empty.
    """

    spec: KernelSpec
    op: OpSpec | None
    device: str
    dtype: str
    skip: str = ""
    interpreted: bool = False
    expected: str = ""
    suspected: str = ""

    def __str__(self) -> str:
        return f"{self.spec}-{self.dtype}"

    def check(self) -> ConformanceReport:
        """Run the conformance check. In an interpreter, on small samples, and the situations of training on one."""
        from veomni_conformance.conformance import check_kernel
        from veomni_ops.contract import Size

        if self.interpreted:
            size = Size.SMALL
            return check_kernel(self.spec, self.device, self.dtype, op=self.op, largest=size, every_form=False)
        return check_kernel(self.spec, self.device, self.dtype, op=self.op)


def cases_of(request: CheckRequest) -> list[KernelCase]:
    """The cases of a request, in the order in which the plugin describes its kernels.

    With ``triton_interpreter`` on a machine without an accelerator, Triton is switched to its interpreter for the rest
    of the process.

    Raises:
        UnknownNameError: there is no such plugin, kernel, dtype or expected failure.
        PluginError: the plugin failed to load, or has no kernels.
        HostError: this machine has no such device, or Triton can no longer be switched to its interpreter.
    """
    registry = discover()
    record = registry.plugin(request.plugin)
    if not record.healthy:
        raise PluginError(f"{record} {record.absence}")
    if not record.kernels:
        left_out = "".join(f"; left out: {skipped}" for skipped in record.skipped)
        raise PluginError(f"{record} describes no kernels, so there is nothing to check{left_out}")
    for dtype in request.dtypes:
        _require_known("dtypes", dtype, DTYPES)
    for kernel in request.kernels:
        _require_known("kernels", kernel, [name for spec in record.kernels for name in (spec.name, str(spec))])
    hardware, device = device_here(registry.detect_hardware(), request.device, "device")
    cases = list(cases_in(request, record, registry, hardware, device))
    if any(case.interpreted for case in cases):
        from veomni_conformance.triton_interpreter import interpret_triton

        interpret_triton()
    for name in request.expected_failures:
        _require_known("expected_failures", name, [name for case in cases for name in (str(case.spec), str(case))])
    return cases


def cases_in(
    request: CheckRequest, record: PluginRecord, registry: Registry, hardware: Hardware, device: str
) -> Iterator[KernelCase]:
    """The cases of ``request`` in one plugin, on ``hardware``."""
    for spec in record.kernels:
        if request.kernels and not {spec.name, str(spec)} & set(request.kernels):
            continue
        reasons = spec.hardware.unmet(hardware)
        interpreted = request.triton_interpreter and hardware.device_type == "cpu" and _needs_a_gpu(spec)
        if interpreted:  # the interpreter needs the packages, and no GPU
            reasons = replace(spec.hardware.chosen_for(hardware), device_type=ANY_DEVICE).unmet(hardware)
        for dtype in spec.dtypes:
            if request.dtypes and dtype not in request.dtypes:
                continue
            expected = request.expected_failures.get(f"{spec}-{dtype}") or request.expected_failures.get(str(spec), "")
            op, skip = registry.ops.get(spec.op_name), "; ".join(reasons)
            yield KernelCase(
                spec, op, device, dtype, skip, interpreted and not skip, expected, spec.fault_seen(hardware)
            )


def _needs_a_gpu(spec: KernelSpec) -> bool:
    types = {each.device_type for each in (spec.hardware, *spec.hardware.others)}
    return types <= {"cuda", "rocm"}


def _require_known(attribute: str, name: str, known: Iterable[str]) -> None:
    known = list(dict.fromkeys(known))
    if name not in known:
        raise UnknownNameError(f"{attribute}: there is no {name!r} here. {did_you_mean(name, known)}")
