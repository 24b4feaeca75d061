"""On which sharded parameters a kernel may be bound: real processes, each of which gets the same answer."""

from __future__ import annotations

import pytest

from distributed import run_ranks

FLATTENED = """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from models import EVERY_KERNEL, build, tokens
    from counting_kernels import calls, counting_registry
    from veomni_core import bind, find_sites
    from veomni_core.errors import KernelUnavailableError

    registry, ids = counting_registry("one"), tokens(2, 9)
    model = build({family!r})
    model.set_attn_implementation("sdpa")
    policy = ModuleWrapPolicy({{type(model.model.layers[0])}})
    cpu = torch.device("cpu")
    settings = {{"auto_wrap_policy": policy, "use_orig_params": {keep_parameters}, "device_id": cpu}}
    wrapped = FullyShardedDataParallel(model, **settings)

    def loss():
        return wrapped(input_ids=ids, labels=ids, use_cache=False).loss

    for seen in (wrapped, model, model.model.layers[1]):  # the wrapper itself, and what is below it
        for ran_before in (False, True):
            sites = find_sites(seen, registry)
            assert {{site.op_name for site in sites}} >= set(registry.ops) - {{"attention"}}
            assert all(site.variant is None for site in sites)
            assert all("call bind before the model is wrapped" in site.evidence for site in sites)
            if not ran_before:
                wanted = loss()
                wanted.backward()
    with bind(wrapped, EVERY_KERNEL, registry=registry) as binding:
        assert not any(decision.bound for op in binding.plan.ops for decision in op.sites)
        found = loss()
        found.backward()
        torch.testing.assert_close(found, wanted)
    with bind(wrapped, {{"preset": "eager"}}, registry=registry):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "sdpa" and not calls
    try:
        bind(wrapped, {{"preset": "eager", "rms_norm_implementation": "one"}}, registry=registry)
    except KernelUnavailableError as error:
        print(error)
    print(sorted((site.op_name, site.path, site.evidence) for site in find_sites(wrapped, registry)))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("family, keep_parameters", [("llama", True), ("qwen3_moe", False)])
def test_what_fsdp1_has_flattened_is_left_eager_and_never_looked_at(family, keep_parameters):
    outputs = run_ranks(FLATTENED.format(family=family, keep_parameters=keep_parameters))
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("rms_norm_implementation: one covers none of the 1 sites")
    assert "FullyShardedDataParallel has flattened the parameters of the model" in outputs[0]


WRAPPED_AFTER = """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from models import EVERY_KERNEL, build, tokens
    from counting_kernels import calls, counting_registry
    from veomni_core import bind

    config = {{**EVERY_KERNEL, "cross_entropy_loss_implementation": "eager"}}
    steps = []
    for bound in (False, True):
        model = build("qwen3_moe")
        if bound:
            bind(model, config, registry=counting_registry("one"))
        policy, cpu = ModuleWrapPolicy({{type(model.model.layers[0])}}), torch.device("cpu")
        settings = {{"auto_wrap_policy": policy, "use_orig_params": {keep_parameters}, "device_id": cpu}}
        wrapped = FullyShardedDataParallel(model, **settings)
        ids = tokens(2, 9, seed=torch.distributed.get_rank())
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        steps.append([loss.detach(), *(p.grad for p in wrapped.parameters() if p.grad is not None)])
    assert {{op for op, *_ in calls}} == {{"rms_norm", "moe_experts", "rotary_pos_emb", "load_balancing_loss"}}, calls
    for eager, kernels in zip(*steps, strict=True):
        torch.testing.assert_close(kernels, eager, rtol=1e-4, atol=1e-6)
"""


@pytest.mark.parametrize("keep_parameters", [True, False])
def test_a_model_that_fsdp1_wraps_after_bind_trains_on_its_kernels(keep_parameters):
    run_ranks(WRAPPED_AFTER.format(keep_parameters=keep_parameters))


TENSOR_PARALLEL = """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
    from models import EVERY_KERNEL, build, tokens
    from counting_kernels import counting_registry
    from veomni_core import bind
    from veomni_core.errors import KernelUnavailableError
    from veomni_transformers.engine.sharding import ModelSharding

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    registry, ids = counting_registry("one"), tokens(2, 8)
    mlp = "model.layers.*.mlp"
    plan = {
        f"{mlp}.gate_proj": ColwiseParallel(),
        f"{mlp}.up_proj": ColwiseParallel(),
        f"{mlp}.down_proj": RowwiseParallel(),
        "model.norm": SequenceParallel(use_local_output=True),
    }

    def step(model):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return loss, {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}

    def assert_equal(found, wanted):
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
        for name, gradient in wanted[1].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)
"""
BOUND_AFTER = """
    eager, model = (parallelize_module(build("llama"), mesh, plan) for _ in range(2))
    binding = bind(model, EVERY_KERNEL, registry=registry)
    bound = {op.op_name: [d.site.path for d in op.sites if d.bound] for op in binding.plan.ops}
    print({op: paths for op, paths in bound.items() if paths})
    print({d.reason for op in binding.plan.ops for d in op.sites if op.op_name == "swiglu_mlp"})
    assert_equal(step(model), step(eager))
    binding.undo()
    try:
        bind(model, {"preset": "eager", "swiglu_mlp_implementation": "one"}, registry=registry)
    except KernelUnavailableError as error:
        print(error)
"""


def test_tensor_parallel_weights_are_refused_and_whole_norms_beside_them_bound():
    outputs = run_ranks(TENSOR_PARALLEL + BOUND_AFTER)
    assert outputs[0] == outputs[1]
    bound, reason, error = outputs[0].splitlines()
    norms = [f"model.layers.{n}.{name}_layernorm" for n in (0, 1) for name in ("input", "post_attention")]
    assert bound == str({"rms_norm": norms, "rotary_pos_emb": [f"model.layers.{n}.self_attn" for n in (0, 1)]})
    assert reason.count("gate_proj.weight is a DTensor, Shard(dim=0) over mesh dimension tp") == 1
    assert error.startswith(
        "swiglu_mlp_implementation: one covers none of the 2 sites: not proven: bind does not support"
    )


def test_norms_and_mlps_that_are_sharded_after_they_were_bound_compute_the_same():
    run_ranks(
        TENSOR_PARALLEL
        + """
    eager, model = build("llama"), build("llama")
    bind(model, {**EVERY_KERNEL, "cross_entropy_loss_implementation": "eager"}, registry=registry)
    assert_equal(step(parallelize_module(model, mesh, plan)), step(parallelize_module(eager, mesh, plan)))
"""
    )


def test_fsdp2_is_told_from_fsdp2_over_tensor_parallel():
    outputs = run_ranks(
        TENSOR_PARALLEL
        + """
    model = parallelize_module(build("llama"), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["tp"], plan)
    dp = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"]
    untouched = build("llama")
    for sharded in (model.model.layers[0], model):
        fully_shard(sharded, mesh=dp)
    sharding = ModelSharding(model)
    paths = ("model.layers.0.mlp", "model.layers.0.mlp.act_fn", "model.layers.1.input_layernorm", "lm_head")
    print([sharding.of(path).kind for path in paths], ModelSharding(untouched).of("model").kind)
"""
    )
    assert outputs == ["['tensor_parallel', 'tensor_parallel', 'fsdp2', 'fsdp2'] whole\n"] * 2
