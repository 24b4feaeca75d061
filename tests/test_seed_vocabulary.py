"""Each row of the audit of VeOmni's design notes works, answers with what to write, or is where a page or test says."""

from __future__ import annotations

import importlib
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import nn
from torch.distributed.tensor import Shard
from transformers import AutoConfig, AutoModelForCausalLM

import veomni_core as v
from veomni_core.errors import VeOmniError
from veomni_ops.veomni_names import INSTEAD

ROOT = Path(__file__).resolve().parent.parent
ROWS: dict[int, list[str]] = yaml.safe_load((ROOT / "tests" / "seed_vocabulary.yaml").read_text(encoding="utf-8"))
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
FLASH, NPU = ("flash_attention_2", "flash_attention_3", "flash_attention_4"), "ascend-910b"
registry = cache(v.discover)


def ops(**fields: Any) -> Any:
    return v.OpsConfig.from_dict({"preset": "eager", **fields}, registry())


def kernel(op: str, variant: str, name: str) -> Any:
    return registry().resolve(op, variant, name)


def asked(op: str, name: str, variant: str = "standard", on: str = "h200") -> str | None:
    """What runs at a site of ``variant`` where a job names ``name``."""
    site = v.Site(op, "a.path", "a rule", variant, "given", dtype="bfloat16")
    plan = v.plan_sites([site], ops(**{registry().op(op).config_field: name}), hardware=on)
    return next(decision.kernel for decision in plan.decisions)


@cache
def skeleton(model_type: str) -> Any:
    experts = {"moe_intermediate_size": 16, "num_experts": 4} if "moe" in model_type else {}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE, **experts)).bfloat16()


def planned(model_type: str, *preset: str, **fields: Any) -> Any:
    fields |= {"preset": "gpu"} if preset else {}
    return v.make_plan(skeleton(model_type), ops(**fields), hardware="h200")


def with_slot(op: str, variant: str) -> nn.Module:
    kind = type("Holder", (nn.Module,), {"slot": v.OpSlot(op, variant), "forward": lambda self, x: x})
    return kind()


def slot_site(op: str, variant: str) -> Any:
    (site,) = v.find_sites(with_slot(op, variant), registry())
    return site


def bound_slot(op: str, variant: str, name: str) -> Any:
    return v.bind(with_slot(op, variant), ops(**{registry().op(op).config_field: name}))


def spec(name: str, factory: Any = "acme:norm") -> v.KernelSpec:
    return v.KernelSpec(name=name, op_name="rms_norm", variant="standard", factory=factory, description="a norm")


def same(architecture: str, bound: bool, **options: Any) -> bool:
    """Whether a tiny Llama gives what it gave unbound, all outputs, with its loss on a kernel if it is ``bound``."""
    torch.manual_seed(0)
    settings = {**SHAPE, "attn_implementation": "eager", "num_labels": 4}
    model = getattr(transformers, architecture)(AutoConfig.for_model("llama", **settings)).eval()
    ids = torch.tensor([[3, 1, 2, 0]])
    wanted = model(ids, labels=ids, use_cache=False, **options)
    binding = v.bind(model, ops(cross_entropy_loss_implementation=["chunk_loss", "auto"]))
    kernels = [kernel.spec.op_name for kernel in binding.plan.kernels]
    torch.testing.assert_close(dict(model(ids, labels=ids, use_cache=False, **options)), dict(wanted))
    return kernels == ["cross_entropy_loss"] * bound and len(wanted) >= 2 + len(options) - ("logits_to_keep" in options)


def divided(dimensions: dict[str, int]) -> Any:
    """A plan for expert parallelism by the parameters of experts, as VeOmni's ``parallel_plan.py`` writes it."""
    experts = {f"model.layers.*.mlp.experts.{name}": Shard(each) for name, each in dimensions.items()}
    sizes = {"fsdp_size": 2, "ep_size": 2, "ep_plan": v.ParallelPlan(extra_parallel_plan={"ep": experts})}
    return v.make_plan(skeleton("qwen3_moe"), ops(), hardware="h200", distributed_config=sizes)


@pytest.mark.parametrize("name", INSTEAD)
def test_a_name_of_veomnis_guides_is_answered_where_it_is_imported(name: str) -> None:
    assert name not in v.__all__
    with pytest.raises(ImportError, match=f"veomni_core has no {name}: ") as raised:
        exec(f"from veomni_core import {name}")
    if line := re.search(r"from \w+(\.\w+)* import \w+", str(raised.value)):
        exec(line[0])
    for module, attribute in re.findall(r"((?:veomni_core|torch)(?:\.[a-z]\w*)*)\.(\w+)", str(raised.value)):
        assert hasattr(importlib.import_module(module), attribute)


def test_every_row_is_there() -> None:
    assert list(ROWS) == [*range(1, 128)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row}-{ROWS[row][0]}")
def test_a_row_of_the_audit(row: int) -> None:
    _, how, what, *words = ROWS[row]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if how == "works":
            assert eval(what, globals())
        elif how == "says":
            with pytest.raises((VeOmniError, AttributeError)) as raised:
                eval(what, globals())
            assert words[0] in " ".join(str(raised.value).split())
        elif how == "test":
            file, _, name = what.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {name}(" in text
        else:
            assert how == "page" and words[0] in " ".join((ROOT / what).read_text(encoding="utf-8").split())
