"""Copies of a library's functions, of a small library with fla's kind of dispatcher."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest
import torch

from veomni_fla.chunk_gated_delta_rule import with_denormals
from veomni_fla.pinned import pinned

BACKENDS = """
    import functools, os, torch

    class BackendRegistry:
        def dispatch(self, function):
            @functools.wraps(function)
            def wrapper(*args):
                if os.environ.get("SMALL_BACKEND"):
                    return "the environment's"
                return function(*args)

            return torch.compiler.disable(wrapper)

    dispatch = BackendRegistry().dispatch
"""
OPS = """
    import dataclasses
    import functools
    import torch
    from small_library.backends import dispatch

    def guarded(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args)

        return inner

    @dispatch
    def gradients(x):
        return "the default's"

    @guarded
    def even(n, x):
        return gradients(x) if n == 0 else odd(n - 1, x)

    def odd(n, x, *, step=1):
        return even(n - step, x)

    class Doubled(torch.autograd.Function):
        @staticmethod
        @guarded
        def forward(ctx, x):
            ctx.said = gradients(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            assert gradients(gradient) == ctx.said
            return gradient * 2

    @dispatch
    def doubled(x):
        return [Doubled.apply(each) for each in (x,)][0]

    @dataclasses.dataclass
    class JITImpl:
        pass_configs: dict | None

    with_fast_math, plain = JITImpl({"tl.enable_fast_math": True}), JITImpl(None)

    def compiled():
        return with_fast_math.pass_configs, plain.pass_configs
"""


@pytest.fixture
def ops(tmp_path, monkeypatch):
    package = tmp_path / "small_library"
    package.mkdir()
    for name, text in (("__init__", ""), ("backends", BACKENDS), ("ops", OPS)):
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("small_library.ops")
    for name in [name for name in sys.modules if name.startswith("small_library")]:
        del sys.modules[name]


def test_the_environment_decides_for_the_library_and_not_for_the_copy(ops, monkeypatch):
    monkeypatch.setenv("SMALL_BACKEND", "1")
    assert ops.even(2, None) == "the environment's"
    assert pinned(ops.even)(2, None) == "the default's"
    assert ops.even(2, None) == "the environment's"


def test_another_implementation_can_be_chosen_for_the_copy(ops):
    copy = pinned(ops.even, {"gradients": lambda x: "the chosen one's"})
    assert copy(4, None) == "the chosen one's" and ops.even(4, None) == "the default's"
    assert (copy.__name__, copy.__module__) == ("even", "small_library.ops")


def test_kernels_in_tilelang_are_compiled_with_denormals_for_the_copy(ops):
    flags = {"tl.device_compile_flags": ["--ftz=false"]}
    assert pinned(ops.compiled, compiled=with_denormals)() == ({"tl.enable_fast_math": True, **flags}, flags)
    assert ops.compiled() == pinned(ops.compiled)() == ({"tl.enable_fast_math": True}, None)


def test_an_implementation_for_what_the_library_does_not_dispatch_is_refused(ops):
    with pytest.raises(ImportError, match="small_library dispatches no other: it is another version than expected"):
        pinned(ops.even, {"other": print})


def test_an_autograd_function_is_copied_and_raises_for_second_derivatives(ops, monkeypatch):
    copy, theirs = pinned(ops.doubled), ops.Doubled
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(copy(x).sum(), x)
    assert torch.equal(gradient, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="computes no second derivatives"):
        torch.autograd.grad(copy(x).sum(), x, create_graph=True)
    assert ops.Doubled is theirs and torch.autograd.grad(ops.doubled(x).sum(), x, create_graph=True)
