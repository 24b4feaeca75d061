"""An operator's function is called as it is where nothing watches, and otherwise through PyTorch's dispatcher."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from veomni_ops.torch_operators import operator

calls = []


def _scaled(x, by, others=(), names=""):
    calls.append((type(by), sys._getframe(1).f_code.co_name == "call"))
    assert not any(each.is_neg() for each in (x, *others))  # a kernel reads memory as it is
    return x * by + sum(others)


scaled = operator(
    "veomni_ops_tests::scaled(Tensor x, float by, Tensor[] others, str? names) -> Tensor", _scaled, _scaled
)


class Wrapped(torch.Tensor):
    """A subclass whose operators see what it wraps."""

    @staticmethod
    def __new__(cls, inner):
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, args), **(kwargs or {}))


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class WatchFunctions(TorchFunctionMode):
    """Lists the functions of PyTorch that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def called(*args):
    """The type that the function got, and whether the call came to it directly."""
    calls.clear()
    found = scaled(*args)
    return found, calls[-1]


X = torch.arange(3.0)
OTHERS = Wrapped(X), torch._neg_view(-X)


@pytest.mark.parametrize("others", [[], [X], (X, nn.Parameter(X))], ids=["none", "list", "tuple"])
def test_plain_tensors_come_directly(others):
    for x in (X, nn.Parameter(X)):
        found, how = called(x, 2.0, others, "name")
        assert torch.equal(found, X * (2 + len(others))) and how == (float, True)


@pytest.mark.parametrize(
    "args",
    [(X, 2, [], None), *((x, 2.0, [], None) for x in OTHERS), *((X, 2.0, [0 * X, x], None) for x in OTHERS)],
    ids=["an int for a float", "a subclass", "an opposite sign", "a subclass in a list", "an opposite sign in a list"],
)
def test_what_the_dispatcher_changes_goes_through_it(args):
    found, how = called(*args)
    assert torch.equal(found, X * (2 + bool(args[2]))) and how == (float, False)


def test_modes_and_profilers_see_operators():
    with Watch():
        assert called(X, 2.0, [], None)[1] == (float, False)
    with torch.profiler.profile() as profile:
        scaled(X, 2.0, [], None)
    assert "veomni_ops_tests::scaled" in {event.key for event in profile.key_averages()}
    assert called(X, 2.0, [], None)[1] == (float, True)


def test_modes_of_functions_see_the_operator_alone():
    with WatchFunctions() as watch:
        scaled(X, 2.0, [], None)
    assert watch.seen == [torch.ops.veomni_ops_tests.scaled.default]


def test_profilers_of_all_threads_see_operators():
    everywhere = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=everywhere) as profile, ThreadPoolExecutor(1) as thread:
        thread.submit(scaled, X, 2.0, [], None).result()
    assert "veomni_ops_tests::scaled" in {event.key for event in profile.key_averages()}


def test_batched_tensors_come_one_by_one():
    # Their type is the plain one, and they have no memory. Batched gradients come through another, older vmap.
    doubled = operator(
        "veomni_ops_tests::doubled(Tensor x) -> Tensor", lambda x: torch.from_numpy(2 * x.numpy()), torch.empty_like
    )

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return doubled(x)

        @staticmethod
        def backward(ctx, upstream):
            return doubled(upstream)

    x = torch.stack([X, X])
    assert torch.equal(torch.vmap(doubled)(x), 2 * x)
    leaf = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(Doubled.apply(leaf), leaf, x, is_grads_batched=True)[0], 2 * x)


def test_inference_takes_the_direct_way():
    with torch.inference_mode():
        assert called(X, 2.0, [], None)[1] == (float, True)


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traces_have_the_operator(pre_dispatch):
    graph = make_fx(lambda x: scaled(x, 2.0, [], None), pre_dispatch=pre_dispatch)(X).graph
    assert any(node.target is torch.ops.veomni_ops_tests.scaled.default for node in graph.nodes)
    traced = torch.jit.trace(lambda x: scaled(x, 2.0, [x], "name"), X)
    assert "veomni_ops_tests::scaled" in str(traced.graph)


def test_compiled_calls_have_the_operator():
    graphs = []

    def backend(module, _):
        graphs.append(module.graph)
        return module

    found = torch.compile(lambda x: scaled(x, 2.0, [x], None), fullgraph=True, backend=backend)(X)
    assert torch.equal(found, 3 * X)
    assert any(node.target is torch.ops.veomni_ops_tests.scaled.default for node in graphs[0].nodes)


def test_a_meta_tensor_gets_fake_results():
    found, how = called(torch.zeros(3, device="meta"), 2.0, [], None)
    assert found.is_meta and how == (float, False)


def test_a_module_can_be_loaded_again(tmp_path, monkeypatch):
    source = "from veomni_ops.torch_operators import operator\n"
    source += "tripled = operator('veomni_ops_tests::tripled(Tensor x) -> Tensor', lambda x: {} * x, lambda x: x + x)\n"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "defines_tripled.py").write_text(source.format(2))
    module = importlib.import_module("defines_tripled")
    (tmp_path / "defines_tripled.py").write_text(source.format("3.0"))
    importlib.reload(module)
    assert torch.equal(module.tripled(X), 3 * X)
    assert torch.equal(torch.ops.veomni_ops_tests.tripled(X), 3 * X)
    with Watch():
        assert torch.equal(module.tripled(X), 3 * X)
