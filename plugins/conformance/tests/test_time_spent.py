"""What a report says of the time that a check took."""

from __future__ import annotations

import threading
from itertools import count

import pytest
import torch
from planted_faults import right
from torch._dynamo import lookup_backend

from veomni_conformance import check_kernel, conformance
from veomni_conformance.time_spent import COMPARING, COMPILING, KERNEL, OTHER, TimeSpent, compilers_counted
from veomni_core import KernelSpec
from veomni_ops.contract import Size


class Clock:
    """Stands still until what is timed moves it, and counts how often each did."""

    def __init__(self) -> None:
        self.now, self.moved = 0.0, dict.fromkeys(("kernel", "compiler"), 0)

    def __call__(self) -> float:
        return self.now

    def move(self, who: str, seconds: float) -> None:
        self.now += seconds
        self.moved[who] += 1


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    CLOCK.__init__()
    monkeypatch.setattr(conformance, "TimeSpent", lambda: TimeSpent(CLOCK))
    return CLOCK


def slow(gate, up):
    CLOCK.move("kernel", 3.0)
    return right(gate, up)


def _slow_compiler(graph, inputs):
    CLOCK.move("compiler", 5.0)
    return lookup_backend("aot_eager")(graph, inputs)


def compiled(gate, up):
    CLOCK.move("kernel", 1.0)
    return torch.compile(right, backend=_slow_compiler)(gate, up)


def _seconds(kernel):
    spec = KernelSpec("timed", "swiglu_mlp", "standard", f"{__name__}:{kernel.__name__}")
    report = check_kernel(spec, largest=Size.SMALL)
    report.raise_if_failed()
    return report.seconds


def test_all_of_the_time_is_accounted_for_once(monkeypatch):
    readings = count()
    monkeypatch.setattr(conformance, "TimeSpent", lambda: TimeSpent(lambda: next(readings)))
    seconds = _seconds(right)
    assert set(seconds) == {"compiling", "kernel", "reference", "comparing", "other"}
    assert sum(seconds.values()) == next(readings) - 1  # from the first reading to the last
    assert min(seconds[each] for each in ("kernel", "reference", "comparing")) > 0


def test_what_a_kernel_takes_is_the_kernel_s(clock):
    seconds = _seconds(slow)
    assert clock.moved["kernel"] > 10
    assert seconds == {**dict.fromkeys(seconds, 0.0), "kernel": 3.0 * clock.moved["kernel"]}


def test_what_torch_compiles_is_not_the_kernel_s_time(clock):
    seconds = _seconds(compiled)
    assert clock.moved["compiler"] > 0
    assert seconds["compiling"] == 5.0 * clock.moved["compiler"]
    assert seconds["kernel"] == 1.0 * clock.moved["kernel"]


def test_a_compiler_in_another_thread_counts_as_one(clock):
    """As in backward on a GPU, which autograd runs in a thread of the device."""
    spent = TimeSpent(clock)

    def compile_something():
        with spent.on(COMPILING):
            clock.move("compiler", 5.0)

    with spent.on(KERNEL):
        thread = threading.Thread(target=compile_something)
        thread.start()
        thread.join()
        clock.move("kernel", 1.0)
    assert spent.rounded() == {**dict.fromkeys(spent.seconds, 0.0), COMPILING: 5.0, KERNEL: 1.0}


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
