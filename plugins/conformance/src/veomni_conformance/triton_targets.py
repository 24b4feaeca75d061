"""The GPUs that Triton compiles for without having them, and the resources of a program on each."""

from __future__ import annotations

import re
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from veomni_core.descriptions.hardware import Hardware
from veomni_core.errors import ConfigError, HostError

# Bytes of shared memory that one block may have, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability").
_SHARED_OF_CAPABILITY = {
    70: 98304,
    75: 65536,
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
    121: 101376,
}
_SHARED_EVERYWHERE = 49152  # what every block may have, without asking for more
# AMD's, by architecture: the local data share of a compute unit (CDNA 3 and CDNA 4 instruction set architectures).
_SHARED_OF_ARCHITECTURE = {"gfx942": 65536, "gfx950": 163840}
_ARCHITECTURE_OF_PRODUCT = {"AMD Instinct MI300X": "gfx942", "AMD Instinct MI355X": "gfx950"}
# Where host code asks how many multiprocessors there are, to size a grid: that changes nothing in what is compiled.
_MULTIPROCESSORS = 100
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
        name: as ``sm90`` or ``gfx942``.
        backend: Triton's name of the vendor's compiler, ``cuda`` or ``hip``.
        arch: what that compiler calls the GPU: a compute capability times ten, or an architecture.
        warp: threads of a warp.
        shared_bytes: shared memory that one block may have; ``None`` if it is not known here.
    """

    name: str
    backend: str
    arch: int | str
    warp: int
    shared_bytes: int | None

    @classmethod
    def of(cls, hardware: Hardware) -> Target:
        """What Triton calls ``hardware``.

        Raises:
            ConfigError: Triton compiles for no such hardware, or the hardware's architecture is not known here.
        """
        capability = hardware.compute_capability
        if hardware.device_type == "cuda" and capability is not None:
            return cls(f"sm{capability}", "cuda", capability, 32, _SHARED_OF_CAPABILITY.get(capability))
        arch = _ARCHITECTURE_OF_PRODUCT.get(hardware.name)
        if hardware.device_type == "rocm" and arch is not None:
            return cls(arch, "hip", arch, 64, _SHARED_OF_ARCHITECTURE[arch])
        raise ConfigError(
            f"Triton's kernels can't be compiled for {hardware.describe()}: write the name of another GPU, as sm90, "
            "h200, mi300x"
        )

    def driver(self) -> Any:
        """A driver of Triton's for this GPU, where nothing can be launched. Host code may ask it about the GPU."""
        from triton.backends.compiler import GPUTarget

        target = GPUTarget(self.backend, self.arch, self.warp)
        shared_bytes = self.shared_bytes or _SHARED_EVERYWHERE
        properties = {"max_shared_mem": shared_bytes, "multiprocessor_count": _MULTIPROCESSORS}
        return SimpleNamespace(
            get_current_target=lambda: target,
            # Triton remembers what it compiled by the device's number.
            get_current_device=lambda: zlib.crc32(self.name.encode()),
            get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: torch.device("cpu"),
            utils=SimpleNamespace(get_device_properties=lambda device: properties),
        )

    def check_compiler(self) -> None:
        """Check that Triton can compile for this GPU here.

        Raises:
            HostError: a part of Triton is missing.
        """
        if self.backend == "cuda" and self._ptxas() is None:
            raise HostError("Triton has no ptxas here, so nothing can be compiled for NVIDIA's GPUs; reinstall triton")

    def resources(self, kernel: Any) -> tuple[int, int]:
        """Registers of each thread of a compiled kernel, and bytes that it stores elsewhere for want of them."""
        return self._by_ptxas(kernel.asm["ptx"]) if self.backend == "cuda" else _by_assembly(kernel.asm["amdgcn"])

    def _by_ptxas(self, ptx: str) -> tuple[int, int]:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(ptx)
            arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
            command = [str(self._ptxas()), "-v", f"--gpu-name={arch[1] if arch else f'sm_{self.arch}'}"]
            done = subprocess.run(
                [*command, str(source), "-o", str(Path(folder) / "kernel.cubin")], capture_output=True, text=True
            )
        used, spilled = _USED.search(done.stderr), _SPILLED.search(done.stderr)
        if done.returncode or used is None:
            raise HostError(f"ptxas says nothing of the registers of a kernel: {done.stderr.strip()[-300:]}")
        return int(used[1]), int(spilled[2]) if spilled else 0

    def _ptxas(self) -> Path | None:
        from triton import knobs

        try:
            is_blackwell = isinstance(self.arch, int) and self.arch >= 100
            return Path((knobs.nvidia.ptxas_blackwell if is_blackwell else knobs.nvidia.ptxas).path)
        except (RuntimeError, AttributeError):
            return None


def _by_assembly(assembly: str) -> tuple[int, int]:
    """By what AMD's compiler notes in the kernel's metadata. It spills whole registers of four bytes."""

    def noted(what: str) -> int:
        number = re.search(rf"^\s+\.{what}:\s+(\d+)", assembly, re.MULTILINE)
        if number is None:
            raise HostError(f"AMD's compiler says nothing of a kernel's {what}")
        return int(number[1])

    return noted("vgpr_count"), 4 * noted("vgpr_spill_count")
