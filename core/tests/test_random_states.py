"""Loading a kernel leaves the random states of the process alone, whatever is drawn and seeded while it is imported."""

from __future__ import annotations

import random
import sys

import numpy
import pytest
import torch

from veomni_conformance import check_kernel
from veomni_core import KernelSpec
from veomni_core.errors import KernelLoadError
from veomni_core.random_states import random_states_kept

_DRAWS = """
import random
import numpy
import torch

random.random(), numpy.random.rand(), torch.rand(1)
random.seed(7), numpy.random.seed(7), torch.default_generator.manual_seed(7)
"""
_KERNEL = """
def kernel(gate, up):
    return torch.nn.functional.silu(gate) * up


def factory():
    for _ in range(3):
        random.random(), numpy.random.rand(), torch.rand(1)
    return kernel
"""


def drawn() -> tuple[float, ...]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def wanted() -> tuple[float, ...]:
    """What is drawn next, while nothing else draws."""
    with random_states_kept():
        return drawn()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that can be imported, and forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        (tmp_path / "draws_at_import.py").write_text(source)
        return "draws_at_import"

    yield write
    sys.modules.pop("draws_at_import", None)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As in a process of one thread, whichever threads run the tests."""
    monkeypatch.setattr("threading.active_count", lambda: 1)


def test_beside_other_threads_nothing_is_drawn_again(module, monkeypatch):
    monkeypatch.setattr("threading.active_count", lambda: 2)
    spec = KernelSpec("drawing", "swiglu_mlp", "standard", f"{module(_DRAWS + _KERNEL)}:factory")
    repeated = wanted()
    spec.load()
    assert not set(drawn()) & set(repeated)


@pytest.mark.parametrize("attribute", ["kernel", "factory"])
def test_loading_a_kernel_draws_nothing(module, attribute):
    spec = KernelSpec("drawing", "swiglu_mlp", "standard", f"{module(_DRAWS + _KERNEL)}:{attribute}")
    expected = wanted()
    spec.load()
    assert drawn() == expected


def test_a_kernel_that_does_not_load_draws_nothing_either(module):
    spec = KernelSpec("broken", "swiglu_mlp", "standard", f"{module(_DRAWS + 'raise OSError')}:kernel")
    expected = wanted()
    with pytest.raises(KernelLoadError, match="OSError"):
        spec.load()
    assert drawn() == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_the_check_finds_no_fault_with_what_importing_draws(module, monkeypatch, threads):
    monkeypatch.setattr("threading.active_count", lambda: threads)
    spec = KernelSpec("drawing", "swiglu_mlp", "standard", f"{module(_DRAWS + _KERNEL)}:factory")
    assert "import" not in {case.sample for case in check_kernel(spec).cases}


@pytest.mark.gpu
def test_states_of_gpus_are_kept():
    torch.zeros(1, device="cuda")
    before = torch.cuda.get_rng_state()
    with random_states_kept():
        torch.manual_seed(3)
        torch.rand(5, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
