"""Finding sites, planning and binding neither seed nor draw from the process's generators, whoever draws meanwhile."""

from __future__ import annotations

import random
import threading

import numpy
import pytest
import torch
from lookalikes import REGISTRY, PlainMLP, PlainRMSNorm, gated, normed, varied
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import FAMILIES, build
from veomni_core import bind, find_sites

FEW = ("llama", "qwen3_moe", "gemma3_text", "mixtral", "phi3")


class Draws(TorchDispatchMode):
    """Notes each operator that draws from the process's generators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None:
            attends = "scaled_dot_product" in func.name() and not given.get("dropout_p")
            on_meta = getattr(given.get("self"), "is_meta", False)
            self.seen += [] if attends or on_meta else [func.name()]
        return func(*args, **(kwargs or {}))


def states():
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == FEW[1] else pytest.mark.thorough) for name in FAMILIES]
)
def test_nothing_draws_from_the_generators_of_the_process(family):
    model, before = build(family), states()
    with Draws() as draws:
        find_sites(model)
    assert not draws.seen and states() == before


class Dropped(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(nn.functional.silu(x), 0.1, self.training)


def _mlp_with_dropout():
    module = PlainMLP()
    module.act_fn = Dropped()
    return module


DRAW = {
    "a norm": lambda: varied("rms_norm", lambda self, x: normed(self, x) + torch.rand_like(x)),
    "a norm in short rows": lambda: varied(
        "rms_norm", lambda self, x: normed(self, x) + (torch.randn(1) if x.shape[0] == 1 else 0)
    ),
    "an MLP": lambda: varied("swiglu_mlp", lambda self, x: nn.functional.dropout(gated(self, x), 0.5, self.training)),
    "an activation": _mlp_with_dropout,
}


@pytest.mark.parametrize("name", DRAW)
def test_modules_that_draw_are_refused_and_draw_numbers_of_their_own(name):
    model, before = nn.Sequential(DRAW[name](), PlainRMSNorm()), states()
    with Draws() as draws:
        sites = [site for site in find_sites(model, REGISTRY) if site.op_name != "linear"]
    drawing, plain = sorted(sites, key=lambda site: site.path)
    assert drawing.variant is None and plain.variant is not None
    assert not draws.seen and states() == before


def drawn(count, work):
    """``count`` numbers of each generator, drawn while ``work`` is repeated, and how often it was done meanwhile."""
    for generator in (torch.manual_seed, random.seed, numpy.random.seed):
        generator(11)
    numbers, worked, done = [], 0, threading.Event()

    def draw():
        numbers.extend((torch.rand(1).item(), random.random(), numpy.random.random()) for _ in range(count))
        done.set()

    thread = threading.Thread(target=draw)
    thread.start()
    while not done.is_set():
        work()
        worked += 1
    thread.join()
    return numbers, worked


@pytest.mark.parametrize("family", [FEW[0], *(pytest.param(each, marks=pytest.mark.thorough) for each in FEW[1:])])
def test_a_thread_draws_the_same_numbers_beside_binds(family):
    model = build(family)
    wanted, _ = drawn(3000, lambda: None)

    def work():
        with bind(model, {"preset": "auto"}) as binding:
            assert not binding.receipt.changed

    found, _ = drawn(3000, work)
    assert found == wanted and len(set(found)) == len(found)
