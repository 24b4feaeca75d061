"""What a launcher of ours launches is what Triton would: the same compiled kernel, with the same arguments.

Nothing is compiled: a kernel is as many objects as it has specialisations, whose launches are listed. Triton's
interpreter has no launches, so where it is chosen these tests run in a process without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
import triton.language as tl
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import compiler
from triton.runtime import driver, interpreter, jit
from triton.tools.tensor_descriptor import TensorDescriptor

from veomni_conformance.triton_targets import Target
from veomni_core.descriptions.hardware import Hardware
from veomni_ops import triton_launches
from veomni_ops.triton_launches import triton_kernel

SCALE = tl.constexpr(2)
compiling = pytest.mark.skipif(knobs.runtime.interpret, reason="run by test_in_a_process_of_its_own")


def _function(a, b, c, n, m, FIRST: tl.constexpr, SECOND: tl.constexpr = 3):
    tl.store(a, SCALE)


def made():
    return triton_kernel(do_not_specialize=["n"], do_not_specialize_on_alignment=["m"])(_function)


@pytest.fixture
def launches(monkeypatch):
    """Each launch, as the launcher in C gets it."""
    found = []

    def compiled(src, **_):
        assert src.fn.cache_key  # lists the globals that are used, as compiling does
        function = object()
        return SimpleNamespace(
            function=function,
            packed_metadata=("metadata", function),
            run=lambda *args: found.append(args),
            launch_metadata=lambda *_: "metadata of a launch",
        )

    monkeypatch.setattr(compiler, "compile", compiled)
    monkeypatch.setattr("triton.compiler.compile", compiled)
    before = driver._active
    driver.set_active(Target.of(Hardware.named("h100")).driver())
    yield found
    driver._active = before


def launched(launches, run, grid, args, constants):
    """What ``run`` launches, without the hooks, and without the metadata that only they get."""
    launches.clear()
    compiled = run[grid](*args, **constants)
    ((x, y, z, stream, function, metadata, _, _, _, *given),) = launches
    # Constants, which the launcher in C passes over, are as equal as Triton's own key takes them to be: 1 is True.
    return compiled, x, y, z, stream, function, metadata, [id(each) for each in given[:5]], given[5:]


BYTES = torch.zeros(256, dtype=torch.uint8)
TENSORS = [
    BYTES[start : start + 64].view(dtype) if start % dtype.itemsize == 0 else BYTES[:64].view(dtype)
    for start in (0, 8, 16, 24)
    for dtype in (torch.float32, torch.bfloat16, torch.int64)
]
NUMBERS = [0, 1, 16, 17, -16, 2**31 - 1, 2**31, 2**40, 2**63, 1.0, 16.0, -0.0, True, False, None]
DESCRIBED = [TensorDescriptor.from_tensor(torch.zeros(64, 64, dtype=torch.bfloat16), [rows, 32]) for rows in (16, 32)]
ARGUMENTS = st.one_of(
    st.sampled_from(TENSORS),
    st.sampled_from(NUMBERS),
    st.sampled_from(DESCRIBED),
    st.lists(st.sampled_from([*TENSORS, 1, 16]), min_size=1, max_size=3).map(tuple),
)
CONSTANTS = st.fixed_dictionaries(
    {"FIRST": st.sampled_from([1, 2, 1.5, True, None, tl.float32, "word"])},
    optional={
        "SECOND": st.sampled_from([3, 4]),
        "num_warps": st.sampled_from([4, 8]),
        "maxnreg": st.sampled_from([None, 128]),
        "enable_fp_fusion": st.booleans(),
    },
)
GRIDS = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
CALLS = st.lists(st.tuples(GRIDS, st.tuples(*[ARGUMENTS] * 5), CONSTANTS), min_size=1, max_size=6)


@compiling
def test_any_arguments(launches):
    ours = made()
    assert isinstance(ours, triton_launches._Launcher)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(calls=CALLS)
    def check(calls):
        for grid, args, constants in calls:
            expected = launched(launches, ours.kernel, grid, args, constants)
            for _ in range(2):  # looked up by Triton, and by us
                assert launched(launches, ours, grid, args, constants) == expected

    check()
    compiled = [found[0] for found in ours._found.values()]
    assert len({id(each) for each in compiled}) > 100  # and none of them was Triton's to launch again


@compiling
def test_what_is_looked_up_is_not_looked_up_by_triton(launches, monkeypatch):
    ours, call = made(), ((TENSORS[0], None, 16, 5, 1.0), {"FIRST": 1, "num_warps": 8})
    first = launched(launches, ours, (4,), *call)
    monkeypatch.setattr(jit.JITFunction, "run", None)
    assert launched(launches, ours, (4,), *call) == first


@compiling
def test_a_grid_may_depend_on_the_constants(launches):
    ours, call = made(), ((TENSORS[0], None, 16, 5, 1.0), {"FIRST": 2})
    for _ in range(2):
        assert launched(launches, ours, lambda given: (given["FIRST"], given["SECOND"]), *call)[1:4] == (2, 3, 1)


@compiling
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_get_their_launches(hook, launches, monkeypatch):
    ours, call = made(), ((TENSORS[0], None, 16, 5, 1.0), {"FIRST": 1})
    ours[1,](*call[0], **call[1])

    with monkeypatch.context() as patch:
        patch.setattr(getattr(knobs.runtime, hook), "calls", [print])
        ours[1,](*call[0], **call[1])
    ours[1,](*call[0], **call[1])
    hooked, unhooked = (args[6:9] for args in launches[1:])
    assert hooked == ("metadata of a launch", knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    assert unhooked == (None, None, None)


@compiling
def test_hooks_of_the_kernel_and_of_debugging(launches, monkeypatch):
    ours, call, seen = made(), ((TENSORS[0], None, 16, 5, 1.0), {"FIRST": 1}), []
    compiled = ours[1,](*call[0], **call[1])
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "debug", True)
        assert ours[1,](*call[0], **call[1]) is not compiled
    assert ours[1,](*call[0], **call[1]) is compiled
    ours.add_pre_run_hook(lambda *args, **_: seen.append(args))
    ours[1,](*call[0], **call[1])
    assert seen == [call[0]]


@compiling
def test_a_changed_global_is_refused(launches, monkeypatch):
    ours, call = made(), ((TENSORS[0], None, 16, 5, 1.0), {"FIRST": 1})
    ours[1,](*call[0], **call[1])
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(4))
    with pytest.raises(RuntimeError, match="SCALE has changed"):
        ours[1,](*call[0], **call[1])


@compiling
def test_another_driver_has_kernels_of_its_own(launches):
    ours, call = made(), ((TENSORS[0], None, 16, 5, 1.0), {"FIRST": 1})
    compiled = ours[1,](*call[0], **call[1])
    driver.set_active(Target.of(Hardware.named("b200")).driver())
    assert ours[1,](*call[0], **call[1]) is not compiled


@compiling
@pytest.mark.parametrize(
    "args, constants",
    [((None,) * 4, {"m": 1, "FIRST": 1}), ((None,) * 5 + (1,), {})],
    ids=["an argument by its name", "a constant by position"],
)
def test_what_the_key_would_miss_is_refused(args, constants, launches):
    with pytest.raises(TypeError, match="takes its constants by name"):
        made()[1,](*args, **constants)


@compiling
@pytest.mark.parametrize("scratch", [0, 64])
def test_the_launcher_in_c_gets_what_tritons_own_gives_it(scratch, launches, monkeypatch):
    from triton.runtime import _allocation

    given = []
    monkeypatch.setattr(_allocation, "_allocator", SimpleNamespace(get=lambda: lambda *request: request))
    start = object.__new__(CudaLauncher)
    vars(start).update(
        num_ctas=1, launch=lambda *args: given.append(args), global_scratch_size=scratch, global_scratch_align=16,
        profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True,
    )  # fmt: skip
    ours, call = made(), ((TENSORS[0], None, 16, 5, 1.0), {"FIRST": 1})
    ours.kernel[2, 3](*call[0], **call[1]).run = start
    ours[2, 3](*call[0], **call[1])  # by Triton
    ours[2, 3](*call[0], **call[1])
    triton, own = ([None if i in (10, 11, 12) else each for i, each in enumerate(args)] for args in given)
    assert own == triton


@compiling
def test_another_triton_takes_its_own_path(monkeypatch):
    monkeypatch.setattr(triton_launches, "_is_known", lambda _: False)
    assert type(made()) is jit.JITFunction


@pytest.mark.skipif(not knobs.runtime.interpret, reason="Triton's interpreter was not chosen")
def test_the_interpreter_takes_its_own_path():
    assert type(made()) is interpreter.InterpretedFunction


@pytest.mark.skipif(not knobs.runtime.interpret, reason="this is that process")
def test_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
