"""Bound models that are sharded or changed after bind: they run their kernels or their own code, or are refused."""

from __future__ import annotations

import pytest

from distributed import run_ranks
from models import build
from sharded_models import FAMILIES

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers has a distributed engine since 5.21"
)

RUN = """
    import torch
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh
    from counting_kernels import calls, counting_registry
    from models import EVERY_KERNEL, build, tokens
    from veomni_core import bind
    from veomni_core.errors import SiteChangedError

    def step(model, ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def shard(model, **sizes):
        config = DistributedConfig(**sizes)
        _, meshes = initialize_distributed_mesh(config)
        return type(model).maybe_distribute_model(model, config, meshes)

    ids, registry = tokens(2, 9), counting_registry("one")
    for family in ("llama", "qwen3_moe"):
        wanted = step(build(family), ids)
        for sizes in ({"tp_size": 2}, {"fsdp_size": 2}):
            model = build(family)
            binding = bind(model, EVERY_KERNEL, registry=registry)
            calls.clear()
            found = step(shard(model, **sizes), ids)
            assert {op for op, *_ in calls} >= {"rms_norm", "rotary_pos_emb"}, calls
            for name, gradient in wanted.items():
                whole = found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name]
                torch.testing.assert_close(whole, gradient, rtol=1e-4, atol=1e-6, msg=name)
            print(family, sizes, dict(binding.receipt.changed))
    model = build("qwen3_moe")
    bind(model, EVERY_KERNEL, registry=registry)
    try:
        shard(model, fsdp_size=2, ep_size=2)
    except SiteChangedError as error:
        print(error)
"""


def test_a_bound_model_that_is_sharded_afterwards_runs_its_kernels_or_is_refused():
    outputs = run_ranks(RUN)
    assert outputs[0] == outputs[1]
    *changed, refused = outputs[0].splitlines()
    for line in changed:
        the_loss = "{'the loss': \"the output projection's hidden states is a DTensor, which no kernel takes\"}"
        assert line.endswith(the_loss if "tp_size" in line else "{}"), line
    assert refused.startswith("model.layers.0.mlp.experts: num_experts was changed after bind")
    assert "undo() first and bind again after the change" in refused


CHANGED_AFTER_BIND = """
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig
    from counting_kernels import calls, counting_registry
    from models import build, tokens
    from sharded_models import FAMILIES
    from veomni_core import bind

    transformers.logging.set_verbosity_error()
    ids = tokens(2, 9, seed=torch.distributed.get_rank())

    def sharded():
        config = DistributedConfig(fsdp_size=2, ep_size=2)
        kind = transformers.GptOssForCausalLM
        return kind.from_pretrained({folder!r}, distributed_config=config, attn_implementation="eager").train()

    def step(model):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.full_tensor() for p in model.parameters() if p.grad is not None)]

    def halve(model):
        for layer in model.model.layers:
            layer.mlp.experts.alpha = 0.5

    engine, model = sharded(), sharded()
    config = {{"preset": "eager", "moe_implementation": "one", "token_dispatch_implementation": "one"}}
    registry = counting_registry("one", ops=("moe_experts", "token_dispatch"))
    binding = bind(model, {{**config, "on_change": "eager"}}, registry=registry)
    torch.testing.assert_close(step(model), step(engine), rtol=1e-5, atol=1e-7)
    print(sorted((op, count) for (op, *_), count in calls.items()))
    halve(engine), halve(model)  # the experts run gpt-oss's own code, which raises for a choice of another rank
    calls.clear()
    torch.testing.assert_close(step(model), step(engine), rtol=1e-5, atol=1e-7)
    print(sorted((op, count) for (op, *_), count in calls.items()), *sorted(binding.receipt.changed))
"""


def test_experts_that_run_their_own_code_again_get_rows_from_the_dispatch_that_they_can_take(tmp_path):
    build("gpt_oss", **FAMILIES["gpt_oss"]).save_pretrained(tmp_path)
    bound, changed = "[('moe_experts', 2), ('token_dispatch', 2)]", "[('token_dispatch', 2)]"
    paths = " ".join(f"model.layers.{number}.mlp.experts" for number in range(2))
    for output in run_ranks(CHANGED_AFTER_BIND.format(folder=str(tmp_path))):
        assert output.splitlines() == [bound, f"{changed} {paths}"]
