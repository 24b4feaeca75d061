"""A third party's wheel adds to the core's own ops: verified, planned, bound, and the core is not edited."""

from __future__ import annotations

import json
import socket
import textwrap
from pathlib import Path

import pytest

from fresh_environment import FAMILY, FreshEnvironment, build_wheel

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).resolve().parent.parent
VEOMNI = ("-m", "veomni_core.cli")
MODEL = """
import json

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from acme_extensions.attention import HiddenPairs
from acme_extensions.rms_norm import LogWeightRMSNorm
from veomni_core import bind, find_sites, make_plan

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=64)


def with_log_weights():
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    for layer in made.model.layers:
        layer.input_layernorm = LogWeightRMSNorm(32)
    return made


def train(model, **options):
    ids = torch.arange(24).view(2, 12)
    loss = model(ids, labels=ids, use_cache=False, **options).loss
    loss.backward()
    return loss.item(), [parameter.grad.norm().item() for parameter in model.parameters()]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> FreshEnvironment:
    """The core and the third party's plugin, each from its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    wheels = [build_wheel(ROOT / source, folder) for source in (*FAMILY, "examples/plugin_extensions")]
    environment = FreshEnvironment(folder / "environment")
    environment.link_requirements(wheels, also=("accelerate",))  # transformers loads sharded models by it
    environment.install(*wheels)
    return environment


@pytest.fixture(scope="module")
def forked(environment):
    with environment.forks("transformers.models.llama.modeling_llama", "veomni_transformers.build") as run:
        yield run


@pytest.fixture(scope="module")
def run(forked):
    """Runs code after that of ``MODEL``; gives what it printed last."""
    return lambda code: json.loads(forked("-c", MODEL + textwrap.dedent(code)).strip().splitlines()[-1])


def test_every_kernel_passes_the_check(environment):
    results = json.loads(environment.run(*VEOMNI, "verify", "acme-extensions", "--json"))["results"]
    assert {row["result"] for row in results} == {"ok"}, results
    assert len(results) == 12  # four kernels in three dtypes


def test_its_variant_is_found_and_trains_as_eager(run):
    own, bound, sites, verified = run(
        """
        mine = with_log_weights()
        config = {"preset": "eager", "rms_norm_implementation": {"default": "eager", "*.input_layernorm": "acme"}}
        binding = bind(mine, config, verify=True)
        sites = [d.site.path for op in binding.plan.ops for d in op.sites if d.kernel == "acme"]
        print(json.dumps([train(with_log_weights()), train(mine), sites, list(binding.verification.sites)]))
        """,
    )
    assert bound[0] == pytest.approx(own[0], rel=1e-5) and bound[1] == pytest.approx(own[1], rel=1e-4, abs=1e-6)
    assert sites == [f"model.layers.{layer}.input_layernorm" for layer in range(2)]
    assert verified == ["rms_norm/log_weight:acme at 2 sites"]


def test_a_job_sets_its_option_per_site(run):
    own, bound, kernels = run(
        """
        mine = with_log_weights()
        less = {"kernel": "acme", "options": {"keep": "inputs"}}
        chosen = {"*.layers.0.input_layernorm": less, "*.layers.1.input_layernorm": "acme", "default": "eager"}
        binding = bind(mine, {"preset": "eager", "rms_norm_implementation": chosen}, verify=True)
        kernels = {d.site.path: d.kernel for op in binding.plan.ops for d in op.sites if d.bound}
        print(json.dumps([train(with_log_weights()), train(mine), kernels]))
        """,
    )
    assert bound[0] == pytest.approx(own[0], rel=1e-5) and bound[1] == pytest.approx(own[1], rel=1e-4, abs=1e-6)
    assert kernels == {
        "model.layers.0.input_layernorm": "acme(keep='inputs')",
        "model.layers.1.input_layernorm": "acme",
    }


def test_a_value_that_its_option_does_not_allow_is_refused(run, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("{preset: eager, rms_norm_implementation: {kernel: acme, options: {keep: outputs}}}")
    (refusal,) = run(
        f"""
        from veomni_core import OpsConfig
        from veomni_core.errors import ConfigError
        try:
            OpsConfig.from_yaml({str(job)!r})
        except ConfigError as error:
            print(json.dumps([str(error)]))
        """,
    )
    wanted = "rms_norm_implementation: keep must be one of 'normalised', 'inputs', got 'outputs'"
    assert refusal == wanted


def test_its_attention_gets_the_masks_that_it_builds(run):
    own, bound, kinds = run(
        """
        import acme_extensions.attention as attention
        seen = []
        compute = attention.standard
        attention.standard = lambda *args, **kw: seen.append(args[4] is not None) or compute(*args, **kw)
        def model():
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), attn_implementation="eager")
        padding = torch.ones(2, 12, dtype=torch.long)
        padding[1, 9:] = 0
        mine = model()
        bind(mine, {"preset": "eager", "attn_implementation": "acme"})
        print(json.dumps([train(model(), attention_mask=padding), train(mine, attention_mask=padding), seen]))
        """,
    )
    assert bound[0] == pytest.approx(own[0], rel=1e-5) and bound[1] == pytest.approx(own[1], rel=1e-4, abs=1e-6)
    assert kinds == [True, True]


def test_its_layout_is_proven_and_its_limit_is_told_by_the_plan(run):
    variants, few, many = run(
        """
        class UpFirst(torch.nn.Module):
            def __init__(self, like):
                super().__init__()
                self.num_experts = like.num_experts
                self.gate_up_proj, self.down_proj = like.gate_up_proj, like.down_proj

            def forward(self, hidden_states, top_k_index, top_k_weights):
                result = torch.zeros_like(hidden_states)
                for expert in range(self.num_experts):
                    token, place = torch.where(top_k_index == expert)
                    both = torch.nn.functional.linear(hidden_states[token], self.gate_up_proj[expert])
                    up, gate = both.chunk(2, dim=-1)
                    output = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, self.down_proj[expert])
                    result.index_add_(0, token, (output * top_k_weights[token, place, None]).to(result.dtype))
                return result

        def model(experts):
            config = Qwen3MoeConfig(**SMALL, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=16)
            made = AutoModelForCausalLM.from_config(config)
            for layer in made.model.layers:
                layer.mlp.experts = UpFirst(layer.mlp.experts)
            return made

        def planned(experts):
            plan = make_plan(model(experts), {"preset": "eager", "moe_implementation": ["acme", "eager"]})
            return [[d.kernel, d.reason] for op in plan.ops if op.op_name == "moe_experts" for d in op.sites]

        variants = [site.variant for site in find_sites(model(4)) if site.op_name == "moe_experts"]
        print(json.dumps([variants, planned(4), planned(65)]))
        """,
    )
    assert variants == ["standard", "standard"]
    assert [kernel for kernel, _ in few] == ["acme", "acme"]
    assert many == [["eager", "as asked, after: acme takes at most 64 experts, this site has 65"]] * 2


@pytest.mark.parametrize("hardware", ["h200", "mi300x", "cpu"])
def test_one_spec_serves_several_device_types(environment, hardware):
    explained = json.loads(environment.run(*VEOMNI, "explain", "rms_norm", "--hardware", hardware, "--json"))
    (row,) = [row for row in explained["kernels"] if row["kernel"] == "acme"]
    assert (row["variant"], row["runs"]) == ("log_weight", True)


RANK = """
import json, os, sys
import torch

other = os.fork()  # as torchrun would start both
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if other else "1"
from torch import distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from veomni_core import bind

dist.init_process_group("gloo")
folder, rank = sys.argv[1], dist.get_rank()
torch.manual_seed(0)
shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
if rank == 0:
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape)).save_pretrained(folder)
dist.barrier()
sizes = DistributedConfig(fsdp_size=2, ep_size=2)
model = Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=sizes).train()
ids = torch.arange(24).view(2, 12) + rank

def step():
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.item(), *(parameter.grad.to_local().norm().item() for parameter in model.parameters())]

own = step()
binding = bind(model, {"preset": "eager", "token_dispatch_implementation": "acme"}, device="cpu")
bound = [d.site.path for op in binding.plan.ops for d in op.sites if d.kernel == "acme"]
with open(f"{folder}/rank{rank}.json", "w") as file:
    json.dump([own, step(), bound], file)
os._exit(os.waitpid(other, 0)[1] if other else 0)
"""


def test_its_dispatch_brings_tokens_to_the_ranks_of_their_experts(forked, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = f"{probe.getsockname()[1]}"
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    forked("-c", RANK, str(tmp_path), environment=group)
    for rank in range(2):
        own, bound, paths = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert bound == pytest.approx(own, rel=1e-5, abs=1e-7)
        assert paths == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
