"""Migration pages: what each shows before and after trains with the same losses, from the same weights.

The pages are from-use-kernels.md, from-veomni.md and from-attn-implementation.md; the one on Liger's patches is tested
beside Liger's kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig

from migrations import PAGES, SIZES, assert_same_losses, blocks, losses, names_of, save_my_llama
from veomni_core import OpsConfig, binding_of, build_foundation_model, discover
from veomni_ops.catalog import OPS

pytestmark = pytest.mark.docs

TESTS = Path(__file__).resolve().parent
# A dense layer and one of experts: every op that the page's job names.
EXPERTS = {
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "output_router_logits": True,
}
# Kernels of the CPU, in the place of the GPU's. Rotary embeddings have none.
ON_THE_CPU = {
    "rms_norm_implementation": "torch",
    "swiglu_mlp_implementation": "torch",
    "rotary_pos_emb_implementation": "eager",
    "cross_entropy_loss_implementation": "chunk_loss",
    "load_balancing_loss_implementation": "torch",
    "moe_implementation": "grouped_mm",
    "attn_implementation": "sdpa",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a page's reader."""
    monkeypatch.chdir(tmp_path)
    save_my_llama(tmp_path)
    return tmp_path


def test_from_attn_implementation(folder: Path) -> None:
    before, after = (names_of(block) for block in blocks("from-attn-implementation.md", "python"))
    assert before["model"].config._attn_implementation == "sdpa"
    assert [site.kernel for op in after["binding"].plan.ops for site in op.sites if site.bound] == ["sdpa"]
    assert_same_losses(losses(after["model"]), losses(before["model"]))
    (job,) = (yaml.safe_load(block) for block in blocks("from-attn-implementation.md", "yaml"))
    assert OpsConfig.from_dict(job, discover()).choices["attention"].names == ("sdpa",)


def test_a_later_change_of_the_attention_is_in_the_receipt(folder: Path) -> None:
    after = names_of(blocks("from-attn-implementation.md", "python")[1])
    after["model"].set_attn_implementation("eager")
    assert after["binding"].receipt.changed == {"the model": "its attention was set to eager"}


@pytest.mark.skipif(not importlib.util.find_spec("kernels"), reason="needs the library `kernels`")
def test_from_use_kernels(folder: Path) -> None:
    before, after = blocks("from-use-kernels.md", "python")
    (folder / "before.py").write_text(before, encoding="utf-8")
    paths = os.pathsep.join(path for path in [str(TESTS), *sys.path] if path)
    ran = subprocess.run(
        [sys.executable, str(TESTS / "hub_layer_run.py"), "before.py"],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    shown = json.loads(ran.stdout.splitlines()[-1])
    assert shown["calls"] == 9, "three norms in three forwards"
    assert "use_kernels" in shown["refusal"]
    assert_same_losses(losses(names_of(after)["model"]), shown["losses"])


@pytest.mark.parametrize("page", ["from-liger.md", "from-use-kernels.md", "from-veomni.md"])
def test_the_fields_that_a_page_names_are_there(page: str) -> None:
    named = {*re.findall(r"`(\w+_implementation)\b", (PAGES / page).read_text(encoding="utf-8"))}
    assert named <= {"ops_implementation", *(op.config_field for op in OPS)}
    assert len(named) >= 4


def _on_the_cpu(section: dict[str, Any]) -> dict[str, Any]:
    """What a page writes under ``ops_implementation``, with kernels of the CPU where it names some."""
    if "preset" in section:
        return {"preset": "eager", **ON_THE_CPU}
    return {field: ON_THE_CPU[field] for field in section}


def test_from_veomni(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (yaml.safe_load(block)["model"] for block in blocks("from-veomni.md", "yaml"))
    config = AutoConfig.for_model("qwen3_moe", **{**SIZES, **EXPERTS})
    config.save_pretrained(tmp_path / "my-qwen3-moe")
    monkeypatch.chdir(tmp_path)
    trained = []
    for model in (before, after, {**after, "ops_implementation": {"preset": "eager"}}):
        torch.manual_seed(0)
        eager = model["ops_implementation"] == {"preset": "eager"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            built = build_foundation_model(
                model.get("config", model.get("config_path")),
                ops_implementation={"preset": "eager"} if eager else _on_the_cpu(model["ops_implementation"]),
                torch_dtype="float32",
                init_device="cpu",
            )
        bound = {op.config_field for op in binding_of(built).plan.ops if any(site.bound for site in op.sites)}
        assert bound == (set() if eager else {*ON_THE_CPU} - {"rotary_pos_emb_implementation"})
        trained.append(losses(built))
    assert_same_losses(trained[0], trained[2])
    assert_same_losses(trained[1], trained[2])


def test_veomni_s_section_is_read_as_it_is_and_means_the_preset() -> None:
    before, after = (yaml.safe_load(block) for block in blocks("from-veomni.md", "yaml"))
    registry = discover()
    with pytest.warns(FutureWarning) as warned:
        old = OpsConfig.from_dict(before, registry)
    assert len(warned) == 3
    new = OpsConfig.from_dict(after, registry)
    for op in OPS:
        if op.config_field in before["model"]["ops_implementation"]:
            assert old.choices[op.name].names == new.choices[op.name].names, op.config_field
