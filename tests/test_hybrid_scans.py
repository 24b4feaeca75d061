"""Scans on real models: bound equals eager, and for Mamba 2 packed equals separate for each way to say where."""

from __future__ import annotations

import copy
import sys
from types import ModuleType

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.bamba import modeling_bamba

from counting_kernels import calls, counting_registry
from hybrid_models import LENGTHS, hybrid, tokens
from models import step
from test_hybrid_convolutions import distance, packed_inputs
from veomni_core import bind, find_sites

OPS = ("mamba2_scan", "selective_scan")
OP = OPS[0]
FIELD = f"{OP}_implementation"
ALONE = {"preset": "eager", FIELD: "chunked_scan"}
TYPES = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
OF_MAMBA_1 = ("falcon_mamba", "jamba", "mamba", "zamba")
SIZES = {OP: {"heads", "head_width", "groups", "state_width"}, OPS[1]: {"channels", "state_width"}}


def op_of(model_type):
    return OPS[model_type in OF_MAMBA_1]


def alone(model_type):
    return {"preset": "eager", f"{op_of(model_type)}_implementation": "chunked_scan"}


def scan_sites(model):
    return [site for site in find_sites(model) if site.op_name in OPS]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", (*TYPES, *OF_MAMBA_1))
def test_a_bound_model_trains_as_the_eager_one(model_type):
    model, ids = hybrid(model_type), tokens(2, 70)
    sites = scan_sites(model)
    assert sites and {(site.variant, site.own) for site in sites} == {("standard", "eager")}
    op_name = op_of(model_type)
    assert SIZES[op_name] == set(sites[0].sizes)
    wanted = step(model, ids)
    with bind(model, alone(model_type)) as binding:
        assert [len(op.sites) for op in binding.plan.ops if op.op_name == op_name] == [len(sites)]
        found = step(model, ids)
        assert not binding.receipt.changed
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
    assert torch.equal(step(model, ids)[0], wanted[0])  # its own code again


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", (*TYPES, *OF_MAMBA_1))
def test_in_bfloat16_it_is_as_accurate_as_the_eager_one(model_type):
    model, ids = hybrid(model_type, torch.bfloat16), tokens(2, 70)
    exact = step(copy.deepcopy(model).float(), ids)
    wanted = step(model, ids)
    bind(model, alone(model_type))
    found = step(model, ids)
    assert distance(found, exact) <= 1.5 * distance(wanted, exact) + 5e-3
    assert abs(float(found[0] - exact[0])) <= 2.0 * abs(float(wanted[0] - exact[0])) + 1e-2


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", TYPES)
def test_every_mixer_calls_the_kernel_once(model_type):
    model = hybrid(model_type)
    calls.clear()
    with bind(model, {"preset": "eager", FIELD: "one"}, registry=counting_registry("one", ops=(OP,))):
        step(model, tokens(1, 9))
    assert calls[(OP, "standard", "one")] >= len(scan_sites(model))  # Zamba 2 runs its shared layers more than once


@pytest.mark.thorough(one_per=["how"])
@pytest.mark.parametrize("how", ["seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("model_type", TYPES)
def test_packed_sequences_give_what_they_give_alone(model_type, how):
    """Mamba2's causal model hands its mixers neither; its backbone does."""
    model = hybrid(model_type)
    model = model.backbone if model_type == "mamba2" else model
    row = tokens(1, sum(LENGTHS))
    bind(model, {**ALONE, "causal_conv1d_implementation": "torch"})
    together = model(row, **packed_inputs(how))[0]
    alone = torch.cat([model(part, use_cache=False)[0] for part in row.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_unbound_boundaries_are_refused_or_ignored_by_transformers():
    """If this changes, what the record on the op says of transformers has changed."""
    model, row = hybrid("bamba"), tokens(1, sum(LENGTHS))
    with pytest.raises(ValueError, match="packed sequences"):
        model(row, **packed_inputs("seq_idx"))
    mixed = model(row, **packed_inputs("cu_seq_lens_q")).logits
    alone = torch.cat([model(part, use_cache=False).logits for part in row.split(LENGTHS, dim=1)], dim=1)
    assert (mixed - alone).norm() > 1e-2 * alone.norm()
    causal = hybrid("mamba2")
    dropped = causal(row, **packed_inputs("cu_seq_lens_q")).logits
    assert torch.equal(dropped, causal(row, use_cache=False).logits)


def test_boundaries_that_a_scan_can_not_take_are_refused():
    model = hybrid("bamba")
    bind(model, ALONE)
    with pytest.raises(ValueError, match="mamba2_scan: cu_seq_lens_q gives the boundaries of one packed row"):
        model.model.layers[0].mamba(torch.zeros(2, 16, 64), cu_seq_lens_q=torch.tensor([0, 5, 16]))
    model = hybrid("bamba")
    bind(model, {**ALONE, "causal_conv1d_implementation": "torch"})
    with pytest.raises(ValueError, match="pass boundaries as cu_seq_lens_q or seq_idx"):
        model(tokens(1, 16), cu_seqlens=torch.tensor([0, 5, 16]), use_cache=False)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["falcon_h1", "mamba2", "zamba2", "falcon_mamba", "mamba", "zamba"])
def test_a_prompt_in_parts_and_decoding_give_what_its_own_code_gives(model_type):
    """Mamba 2's second part starts from the first's states; single tokens go through the model's own function."""
    model, ids = hybrid(model_type).eval(), tokens(2, 30)
    name = "cache_params" if model_type.endswith(("mamba", "mamba2")) else "past_key_values"

    def logits():
        found, cache = [], None
        for part in (ids[:, :13], ids[:, 13:27], ids[:, 27:28], ids[:, 28:29]):
            out = model(part, use_cache=True, **{name: cache})
            found.append(out.logits)
            cache = getattr(out, name)
        return torch.cat(found, dim=1)

    with torch.no_grad():
        wanted = logits()
        with bind(model, alone(model_type)):
            torch.testing.assert_close(logits(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1"])
def test_verified_and_undone(model_type):
    model = hybrid(model_type)
    found = len(scan_sites(model))
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    binding = bind(model, ALONE, verify=True)
    assert binding.verification.sites == (f"{OP}/standard:chunked_scan at {found} sites",)
    model(tokens(1, 9), use_cache=False)
    binding.undo()
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before


def test_in_training_no_packages_function_runs_in_place_of_a_bound_scan(monkeypatch):
    """Where mamba-ssm is found, an unbound mixer hands it everything from convolution to output projection."""

    def named(name):
        def run(*args, **kwargs):
            raise AssertionError(f"the package's {name} ran")

        run.__module__, run.__name__ = "acme_ssm.ops", name
        return run

    package, own = ModuleType("acme_ssm"), {}
    package.acme_scan, package.acme_fused = named("acme_scan"), named("acme_fused")
    monkeypatch.setitem(sys.modules, "acme_ssm", package)
    for name, theirs in (("mamba2_chunk_scan", "acme_scan"), ("mamba2_split_conv1d_scan_combined", "acme_fused")):
        own[name] = getattr(modeling_bamba, name).__wrapped__
        decorated = use_kernel_func_from_hub_with_fallback(theirs, "acme_ssm")(own[name])
        monkeypatch.setattr(modeling_bamba, name, decorated)
    model, ids = hybrid("bamba"), tokens(1, 9)
    with pytest.raises(AssertionError, match="the package's acme_fused ran"):
        model(ids, use_cache=False)
    with pytest.raises(AssertionError, match="the package's acme_scan ran"):
        model.eval()(ids, use_cache=False)
    model.train()
    assert {site.own for site in scan_sites(model)} == {"acme_ssm.ops.acme_scan"}
    assert "in its place the model would run acme_ssm.ops.acme_scan" in scan_sites(model)[0].evidence
    with bind(model, ALONE):
        step(model, ids)
    # Plain PyTorch stands in for a package's function only where it is named.
    with bind(model, {"preset": "eager", FIELD: "auto"}) as binding:
        [op] = [each for each in binding.plan.ops if each.op_name == OP]
        assert {site.spec for site in op.sites} == {None}
        assert "chunked_scan is plain PyTorch" in op.sites[0].reason


def test_a_mixer_whose_fused_step_computes_something_stays_eager(monkeypatch):
    def mamba2_split_conv1d_scan_combined(projected, *others, **options):
        return projected.sum()

    monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", mamba2_split_conv1d_scan_combined)
    [site, *_] = scan_sites(hybrid("bamba"))
    assert site.variant is None
    assert "in training it calls mamba2_split_conv1d_scan_combined, which computes something" in site.evidence


@pytest.mark.parametrize("model_type", ["bamba", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"])
def test_a_gated_norm_without_its_gate_runs_its_own_code(model_type):
    model = hybrid(model_type)
    path, norm = next(
        (site.path, model.get_submodule(site.path)) for site in find_sites(model) if site.op_name == "rms_norm_gated"
    )
    x = torch.randn(2, 3, norm.weight.shape[0])
    wanted = norm(x)
    with bind(model, {"preset": "eager", "rms_norm_gated_implementation": "torch"}) as binding:
        assert not binding.receipt.changed
        assert torch.equal(norm(x), wanted) and torch.equal(norm(x, None), wanted)
        assert "gate=None, which its proof does not cover" in binding.receipt.changed[path]
