"""Either version of QuACK is called with the parameters that it has, and computes the same. QuACK's are stand-ins."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace

import plain_experts
import plain_loss
import pytest
import torch
from quack_parameters import LIBRARIES

from veomni_ops import cross_entropy_loss, moe_experts
from veomni_quack.cross_entropy_loss import chunks
from veomni_quack.moe_experts import layer, token_sums
from veomni_quack.moe_experts.alignment import padded, readable

_CALLERS = ("versions", "compiling", "cross_entropy_loss.quack_calls", "moe_experts.grouped_gemm")


@pytest.fixture(params=LIBRARIES)
def calls(request, monkeypatch):
    """The modules that call QuACK, imported over one version of it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, name)
    for name, content in LIBRARIES[request.param].items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(content)
    callers = {}
    for name in _CALLERS:
        spec = importlib.util.find_spec(f"veomni_quack.{name}")
        module = callers[name.rpartition(".")[2]] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    monkeypatch.setattr(token_sums, "_compiled_weighted_sum", token_sums._weighted_sum)
    monkeypatch.setattr(token_sums, "_compiled_plain_sum", token_sums._plain_sum)
    return SimpleNamespace(**callers)


def samples(contract):
    return [sample for sample in contract.samples(torch.device("cpu"), torch.bfloat16) if not sample.needs]


@pytest.mark.parametrize("number", range(len(samples(moe_experts.CONTRACTS["standard"]))))
def test_experts(calls, number):
    hidden, index, weights, gate_up, down = samples(moe_experts.CONTRACTS["standard"])[number].args
    with torch.no_grad():
        hidden, gate_up, down = (readable(operand) for operand in padded(hidden, gate_up, down))
    results = []
    for products in (calls.grouped_gemm, plain_experts.PRODUCTS):
        result, pre, routing = layer.forward(hidden, index, weights, gate_up, down, products)
        saved = (hidden, weights, gate_up, down, pre, routing)
        results.append((result, *layer.backward(torch.ones_like(hidden), *saved, projections=True, products=products)))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("learns", [True, False])
def test_losses(calls, learns, monkeypatch):
    monkeypatch.setattr(chunks, "chunk_tokens", lambda tokens, vocabulary: 5)  # several chunks
    hidden, weight, labels = (tensor.detach() for tensor in samples(cross_entropy_loss.CONTRACTS["causal"])[0].args)
    results = []
    for quack in (calls.quack_calls, plain_loss.CALLS):
        total, *found = chunks.loss_and_gradients(hidden, weight, labels, None, -100, None, None, learns, learns, quack)
        if learns:
            _, so_far, _, last = found
            factor = torch.tensor(0.5)
            found.append(chunks.weight_gradient(hidden, len(weight), so_far, last, factor, quack))
        results.append((total, *found))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_a_configuration_is_one_object_at_each_call(calls):
    """QuACK 0.6 finds what it launched before by the ``id`` of the configuration."""
    configuration, operand = calls.grouped_gemm._configuration, torch.zeros(1)
    wide = [configuration(operand, tile_n=256) for _ in range(2)]
    assert wide[0] is wide[1] and wide[0].tile_n == 256
    assert configuration(operand) is configuration(operand)
    assert configuration(operand).tile_n == 192


@pytest.mark.skipif(importlib.util.find_spec("quack") is None, reason="quack-kernels is not installed")
def test_the_stand_ins_have_the_parameters_of_the_installed_version():
    series = importlib.import_module("quack").__version__[:3]
    (stand_ins,) = (modules for version, modules in LIBRARIES.items() if version.startswith(series))
    for name in ("quack.cross_entropy", "quack.gemm_interface"):
        installed = importlib.import_module(name)
        for function, stand_in in stand_ins[name].items():
            mine, theirs = (
                list(inspect.signature(getattr(each, "fn", getattr(each, "_init_fn", each))).parameters)
                for each in (stand_in, getattr(installed, function))
            )
            # 0.6 has more parameters behind those of 0.4, which the plugin leaves alone.
            assert mine == theirs[: len(mine)], function
