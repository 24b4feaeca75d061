"""``build_foundation_model(distributed_config=...)``: every rank builds its part, and the parts are one model's."""

from __future__ import annotations

import pytest

from distributed import run_ranks
from models import build

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers has a distributed engine since 5.21"
)

BUILD = """
    import torch, transformers
    from models import build
    from veomni_core import binding_of, build_foundation_model, make_plan
    from veomni_core.errors import ConfigError, HostError

    transformers.logging.set_verbosity_error()
    whole = build("qwen3_moe")
    kernels = {{"preset": "eager", "rms_norm_implementation": "torch", "moe_implementation": "grouped_mm"}}
    settings = {{"ops_implementation": kernels, "torch_dtype": "float32", "init_device": "cpu", "device": "cpu"}}
    layouts = [{{"fsdp_size": 2}}, {{"fsdp_size": 2, "ep_size": 2}}, {{"tp_size": 2}}, {{"tp_size": 2, "ep_size": 2}}]

    def weights(model):
        named = model.named_parameters()
        return {{name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in named}}

    def refusal(**arguments):
        try:
            build_foundation_model(whole.config, **{{**settings, **arguments}})
        except (ConfigError, HostError) as error:
            print(type(error).__name__, error)
"""

FROM_FILES = """
    stored = weights(whole)
    for layout in layouts:
        model = build_foundation_model(whole.config, {folder!r}, distributed_config=layout, **settings)
        assert all(torch.equal(weight, stored[name]) for name, weight in weights(model).items())
        plan = binding_of(model).plan
        planned = make_plan(whole, kernels, hardware=plan.hardware, distributed_config=layout)
        assert plan.sha256 == planned.sha256
        assert sum(p.to_local().numel() for p in model.parameters() if hasattr(p, "to_local")) < sum(
            p.numel() for p in whole.parameters()
        ) * 0.6
"""

AT_RANDOM = """
    drawn = []
    for layout in layouts:
        torch.manual_seed(5 + torch.distributed.get_rank())  # rank 0 decides
        drawn.append(weights(build_foundation_model(whole.config, distributed_config=layout, **settings)))
    for other in drawn[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in drawn[0].items())
    experts = drawn[0]["model.layers.1.mlp.experts.down_proj"]
    assert 0.015 < experts.std() < 0.025 and not torch.equal(experts[:2], experts[2:])
    assert (drawn[0]["model.norm.weight"] == 1).all()
"""

REFUSED = """
    refusal(distributed_config={{"fsdp_size": 4}})
    refusal(distributed_config={{"fsdp_size": 2, "ep_size": 2}}, config_kwargs={{"num_experts": 3}})
    refusal(distributed_config={{"tp_size": 2}}, config_kwargs={{"num_key_value_heads": 1}})
    refusal(distributed_config={{"fsdp_sizes": 2}})
    refusal(distributed_config={{"fsdp_size": 2, "ep_size": 4}})
    refusal(distributed_config={{"fsdp_size": 2}}, init_device="meta")
    refusal(distributed_config=2)
    dispatch = "alltoall_dedup" if torch.distributed.get_rank() else "eager"
    theirs = {{"preset": "eager", "token_dispatch_implementation": dispatch}}
    refusal(distributed_config={{"fsdp_size": 2, "ep_size": 2}}, ops_implementation=theirs)
"""


def test_parts_of_stored_and_random_weights_are_one_models_whatever_the_layout(tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    outputs = run_ranks((BUILD + FROM_FILES + AT_RANDOM + REFUSED).format(folder=str(tmp_path)))
    assert outputs[0] == outputs[1]
    *messages, whose, what, advice = outputs[0].splitlines()
    assert whose.startswith("PlanMismatchError") and "token_dispatch: " in what and "agree=False" in advice
    for message, start in zip(
        messages,
        (
            "HostError distributed_config needs 4 processes (fsdp_size 4), but 2 run here",
            "ConfigError distributed_config does not fit Qwen3MoeForCausalLM: ep_size=2 does not divide the 3 experts",
            "ConfigError distributed_config does not fit Qwen3MoeForCausalLM: tp_size=2 does not divide the 1 key",
            "ConfigError distributed_config has no fsdp_sizes; its fields are tp_size,",
            "ConfigError distributed_config: `ep_size` must divide `fsdp_size * tp_size`",
            "ConfigError init_device is meta, but transformers' engine builds sharded models on cpu here",
            "ConfigError distributed_config: expected a DistributedConfig or a mapping, not 2",
        ),
        strict=True,
    ):
        assert message.startswith(start), message
