"""Run by test_quick_launch.py in a process without the interpreter: compares quick launches with Triton's own."""

from __future__ import annotations

from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.jit import JITFunction

from benchmarks.shared.stand_in_gpu import stand_in_gpu
from veomni_triton.quick_launch import QuickLaunch, quick_launch


@triton.jit(do_not_specialize=["unspecialised"])
def kernel(x, y, count, unspecialised, factor, strides, BLOCK: tl.constexpr, last, SCALED: tl.constexpr):
    place = tl.arange(0, BLOCK)
    value = tl.load(x + place * strides[0], mask=place < count).to(tl.float32) + unspecialised + last
    if SCALED:
        value *= factor
    if y is not None:
        tl.store(y + place * strides[1], value)
    tl.store(x + place, value)


quick = quick_launch(kernel)
LAUNCHES = []  # grid, stream, kernel's handle, and the arguments


def noted(self, grid_x, grid_y, grid_z, stream, function, metadata, *rest):
    *_, enter, exit = rest[:3]
    LAUNCHES.append(((grid_x, grid_y, grid_z), stream, function, metadata, rest[3:]))
    for hook in (enter, exit):
        if hook is not None:
            hook(rest[0])


def launched(function, grid, arguments, others):
    LAUNCHES.clear()
    function[grid](*arguments, **others)
    (found,) = LAUNCHES
    return found


def same(one, other):
    return one[:4] == other[:4] and all(
        a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(one[4], other[4], strict=True)
    )


def main() -> None:
    handles = set()
    whole, half = torch.zeros(64), torch.zeros(64).bfloat16()
    for x in (whole, half, whole[1:]):
        for y in (whole, half, None):
            for count in (1, 16, 17):
                arguments = (x, y, count, 16, 0.5, (1, 16))
                for others in (
                    {"BLOCK": 16, "last": 1, "SCALED": True, "num_warps": 1},
                    {"BLOCK": 32, "last": 5, "SCALED": False},
                ):
                    own = launched(kernel, (3,), arguments, others)
                    for _ in range(2):  # the first asks Triton, the second doesn't
                        assert same(launched(quick, (3,), arguments, others), own), (arguments, others)
                    handles.add(own[2])
    assert len(handles) == 3 * 3 * 3 * 2, "every one of these is a kernel of its own"
    others = {"SCALED": True, "last": 5, "BLOCK": 16, "num_warps": 4}  # in another order
    for grid in ((2,), (2, 3), (2, 3, 4)):
        for unspecialised in (1, 16, 2**40):
            arguments = (whole, None, 7, unspecialised, 2.0, (4, 4))
            for _ in range(2):
                own = launched(kernel, grid, arguments, others)
                assert same(launched(quick, grid, arguments, others), own)

    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    launched(quick, (2,), arguments, others)
    knobs.runtime.launch_enter_hook.remove(seen.append)
    launched(quick, (2,), arguments, others)
    assert len(seen) == 1, "a profiler's hook sees the launch"
    with patch.object(JITFunction, "run", lambda self, *args, **options: seen.append(self)):
        quick[(2,)](*arguments, **others)
    assert seen[1:] == [kernel], "what replaces Triton's run is called"
    assert type(quick) is QuickLaunch


if __name__ == "__main__":
    with stand_in_gpu(), patch.object(CudaLauncher, "__call__", noted):
        main()
