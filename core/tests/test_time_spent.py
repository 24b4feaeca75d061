"""What a report says of the time that a check took."""

from __future__ import annotations

import threading
import time

import torch

from planted_faults import right
from veomni_core import KernelSpec
from veomni_core.ops.contract import Size
from veomni_core.testing import check_kernel
from veomni_core.testing.time_spent import COMPARING, COMPILING, KERNEL, OTHER, TimeSpent, compilers_counted


def slow(gate, up):
    time.sleep(0.002)
    return right(gate, up)


def _report(kernel, **options):
    spec = KernelSpec("timed", "swiglu_mlp", "standard", f"{__name__}:{kernel.__name__}", **options)
    start = time.perf_counter()
    report = check_kernel(spec, largest=Size.SMALL)
    report.raise_if_failed()
    return report.seconds, time.perf_counter() - start


def test_all_of_the_time_is_accounted_for_once():
    seconds, total = _report(right)
    assert set(seconds) == {"compiling", "kernel", "reference", "comparing", "other"}
    assert abs(sum(seconds.values()) - total) < 0.1 + 0.05 * total
    assert min(seconds[each] for each in ("kernel", "reference", "comparing")) > 0


def test_a_slow_kernel_is_told_from_the_rest():
    fast, _ = _report(right)
    slower, _ = _report(slow)
    assert slower["kernel"] - fast["kernel"] > 0.2
    assert slower["kernel"] > sum(slower.values()) / 3


def compiled(gate, up):
    return torch.compile(right, backend="aot_eager")(gate, up)


def test_what_torch_compiles_is_not_the_kernel_s_time():
    seconds, _ = _report(compiled)
    assert seconds["compiling"] > seconds["kernel"] > 0


def test_a_compiler_in_another_thread_counts_as_one():
    """As in backward on a GPU, which autograd runs in a thread of the device."""
    spent = TimeSpent()

    def compile_something():
        with spent.on(COMPILING):
            time.sleep(0.05)

    with spent.on(KERNEL):
        thread = threading.Thread(target=compile_something)
        thread.start()
        thread.join()
    found = spent.rounded()
    assert found[COMPILING] >= 0.05 and found[KERNEL] < 0.05 and found[COMPARING] == 0 and found[OTHER] < 0.05


def test_what_is_left_in_another_order_than_it_was_entered_is_left():
    spent = TimeSpent()
    spent.enter("first", KERNEL)
    spent.enter("second", COMPARING)
    spent.leave("first")
    assert spent.now == COMPARING
    spent.leave("second")
    spent.leave("never entered")
    assert spent.now == OTHER


def test_no_compiler_is_left_patched():
    import triton

    before = triton.compiler.compile, triton.compiler.CompiledKernel._init_handles
    with compilers_counted(TimeSpent()):
        assert triton.compiler.compile is not before[0]
    assert (triton.compiler.compile, triton.compiler.CompiledKernel._init_handles) == before
