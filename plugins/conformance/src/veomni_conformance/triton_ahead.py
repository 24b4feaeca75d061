"""Compiles a kernel's Triton functions for a GPU that isn't here, and measures the resources that they need.

The kernel's own host code runs on the contract's samples, on the CPU, and each launch of a Triton function is compiled
for the target in place of being launched. What the host code then reads is uninitialised, so it may end early: a
function whose launch it did not reach is not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from veomni_conformance.comparison import one_line
from veomni_conformance.subject import Subject
from veomni_conformance.triton_targets import Target
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.errors import HostError
from veomni_ops.contract import Contract, Size

# Columns of Blackwell's tensor memory, which holds the accumulators of products, that one block may have (PTX ISA,
# "tcgen05.alloc").
_TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class CompiledFunction:
    """One Triton function, specialised to the arguments of a launch, as it is on the target.

    Attributes:
        name: the function's.
        constants: what it was specialised to, as ``BLOCK=512, ROWS=4``.
        warps, stages: with which it was compiled.
        registers: of each thread.
        shared_bytes: shared memory of each block.
        spilled_bytes: what each thread stores outside of its registers for want of them.
        problem: why it can't run on the target; empty if it can.
    """

    name: str
    constants: str
    warps: int
    stages: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    problem: str = ""


@dataclass(frozen=True)
class CompiledAhead:
    """What became of one kernel in one dtype.

    Attributes:
        functions: what was compiled, each specialisation once.
        failures: what can't be compiled, or can't run on the target.
        not_reached: why the host code ended early, if it did.
    """

    functions: tuple[CompiledFunction, ...]
    failures: tuple[str, ...]
    not_reached: tuple[str, ...]


def compile_ahead(spec: KernelSpec, contract: Contract, dtype: str, target: Target) -> CompiledAhead:
    """Compile what ``spec`` launches on the samples of its contract, forward and backward.

    Args:
        spec: the kernel. Triton must not run in its interpreter in this process.
        contract: that of the kernel's op and variant.
        dtype: of the samples.
        target: the GPU.

    Raises:
        HostError: Triton, or its ptxas, is not installed here.
        KernelLoadError: the kernel can't be imported.
    """
    with compiling_for(target) as compiled:
        subject = Subject(spec, spec.load(), contract, torch.device("cpu"), getattr(torch, dtype))
        failures: dict[str, None] = {}
        not_reached: dict[str, None] = {}
        for size in (Size.SMALL, Size.BEYOND_A_TILE):
            for position in subject.positions(size):
                if subject.refused(position):
                    continue
                try:
                    sample = subject.draw(position)
                    results = subject.call(sample)
                    if spec.backward:
                        subject.gradients(results, sample)
                except Exception as error:  # the compiler's, or that of host code which read what was not computed
                    if type(error).__module__.startswith("triton."):
                        failures[" ".join(str(error).split())] = None  # the place, the code, and what is wrong with it
                    else:
                        not_reached[f"at {subject.sample(position).name!r}: {one_line(error)}"] = None
    functions = tuple(dict.fromkeys(compiled))
    failures.update((f"{each.name} ({each.constants}) {each.problem}", None) for each in functions if each.problem)
    return CompiledAhead(functions, tuple(failures), tuple(not_reached))


@contextmanager
def compiling_for(target: Target) -> Iterator[list[CompiledFunction]]:
    """A context in which launches are compiled for ``target`` in place of being made; it gives what was compiled.

    Raises:
        HostError: Triton, or its ptxas, is not installed here.
    """
    try:
        from triton.runtime import autotuner, driver, jit
    except ImportError as error:
        raise HostError(
            f"Triton is not installed here ({error}), so nothing can be compiled; pip install triton"
        ) from error
    target.check_compiler()
    compiled: list[CompiledFunction] = []
    measured: dict[str, tuple[int, int]] = {}
    run, bench = jit.JITFunction.run, autotuner.Autotuner._bench

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in measured:
            measured[kernel.hash] = target.resources(kernel)
        compiled.append(_described(kernel, measured[kernel.hash], target))
        return kernel

    def compile_each(self: Any, *args: Any, config: Any, **meta: Any) -> float:
        """In place of measuring a configuration: all of them are compiled."""
        self.fn.run(*args, **meta, **config.all_kwargs())
        return 1.0

    before = driver._active
    driver.set_active(target.driver())
    jit.JITFunction.run, autotuner.Autotuner._bench = compile_alone, compile_each
    try:
        yield compiled
    finally:
        jit.JITFunction.run, autotuner.Autotuner._bench = run, bench
        driver._active = before


def _described(kernel: Any, resources: tuple[int, int], target: Target) -> CompiledFunction:
    registers, spilled = resources
    metadata = kernel.metadata
    names = kernel.src.fn.arg_names
    constants = {names[place]: value for (place, *_), value in kernel.src.constants.items()}
    return CompiledFunction(
        metadata.name,
        ", ".join(f"{name}={value}" for name, value in constants.items()),
        metadata.num_warps,
        metadata.num_stages,
        registers,
        metadata.shared,
        spilled,
        lacking(metadata, target),
    )


def lacking(metadata: Any, target: Target) -> str:
    """What a block of the target has too little of; empty if it has enough."""
    if target.shared_bytes is not None and metadata.shared > target.shared_bytes:
        has = f"{target.shared_bytes:,}"
        return f"needs {metadata.shared:,} bytes of shared memory, and a block of {target.name} has {has}"
    columns = getattr(metadata, "tmem_size", None) or 0
    if columns > _TENSOR_MEMORY_COLUMNS:
        return f"needs {columns} columns of tensor memory, and a block of {target.name} has {_TENSOR_MEMORY_COLUMNS}"
    return ""
