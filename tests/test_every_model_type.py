"""Every causal model type: a tiny real instance, bound with veomni-torch's kernels, gives eager's loss and gradients.

In float32 the two must agree to rounding. In bfloat16 both are compared with float32 on the same weights, since a
gradient that is zero in exact arithmetic, or a token that another expert takes, differs between any two correct runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distinct_code import DISTINCT, codes, cover
from models import Step, step
from tiny_models import tiny_model
from veomni_core import OpsConfig, bind

# What keeps a type from this test; nothing of it lies in the binding.
NOT_RUN = {
    "blt": "its tiny form has 30 million parameters",
    "cohere_compass_text": "its default config builds no model",
    "dbrx": "its default config builds no model",
    "deepseek_v2": "its default config names no experts per token",
    "dots1": "its default config builds no model",
    "dots3_note": "its config lists layers by number",
    "dots3_note_text": "its config lists layers by number",
    "falcon_h1": "its config lists multipliers by layer",
    "gemma3n": "needs timm",
    "gemma3n_text": "its config lists layers by number",
    "gemma4": "its config lists layers by number",
    "gemma4_assistant": "its default config builds no model",
    "gemma4_text": "its config lists layers by number",
    "gemma4_unified": "its config lists layers by number",
    "gemma4_unified_assistant": "its default config builds no model",
    "gemma4_unified_text": "its config lists layers by number",
    "git": "wants images",
    "hunyuan_v1_dense": "its default config builds no model",
    "hunyuan_v1_moe": "its default config builds no model",
    "lfm2_moe": "its default config builds no model",
    "mamba2": "its config ties heads and widths together",
    "ministral": "its default config builds no model",
    "musicgen": "its default config builds no model",
    "musicgen_melody": "its default config builds no model",
    "nemotron": "its default config builds no model",
    "prophetnet": "nothing in it is proven, so nothing is bound",
    "qwen4_exp": "its default config builds no model",
    "qwen4_exp_text": "its default config builds no model",
    "reformer": "its default config builds no model",
    "xlm": "its tiny form has 200 million parameters",
    "xmod": "wants a language",
    "zamba2": "its config lists layers by number",
}
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Attention stays eager on both sides: another order of its additions is not what is tested here.
OPS = {"preset": "auto", "attn_implementation": "eager"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads in each of several workers would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config() -> OpsConfig:
    return OpsConfig.from_dict(OPS)


def distances(found: Step, wanted: Step) -> dict[str, float]:
    """Per gradient the norm of the difference, as a share of the gradient's plus 1e-5 of that of all gradients.

    The second part is for gradients that are zero in exact arithmetic, as that of a key's bias is: a thousandth of it
    is 1e-8 of all gradients, still less than float32 resolves (6e-8).
    """
    mine, theirs = (
        {name: gradient.double() for name, gradient in gradients.items()} for _, gradients in (found, wanted)
    )
    floor = 1e-5 * float(torch.stack([g.norm() for g in theirs.values()]).norm())
    assert mine.keys() >= theirs.keys()
    assert not any(mine[name].any() for name in mine.keys() - theirs.keys())
    return {name: float((mine[name] - g).norm()) / (float(g.norm()) + floor) for name, g in theirs.items()}


def _marked(model_type: str) -> Any:
    return pytest.param(model_type, marks=[] if model_type in DISTINCT else [pytest.mark.thorough])


@pytest.mark.parametrize("model_type", map(_marked, TYPES))
def test_bound_equals_eager(model_type, config, caplog):
    if model_type in NOT_RUN:
        pytest.skip(NOT_RUN[model_type])
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    model = tiny_model(model_type, torch.float32)
    eager = _eager(model)
    wanted = step(eager, ids)
    with bind(model, config) as binding:
        assert any(decision.bound for op in binding.plan.ops for decision in op.sites)
        found = step(model, ids)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
    far = {name: share for name, share in distances(found, wanted).items() if share > 1e-3}
    assert not far

    low = _eager(tiny_model(model_type, torch.bfloat16))
    exact = tiny_model(model_type, torch.bfloat16).float()
    truth = step(_eager(exact), ids)
    from_eager = distances(step(low, ids), truth)
    with bind(low, config):
        from_bound = distances(step(low, ids), truth)
    # Twice eager's own rounding and a little; where rounding can send a token to another expert, what that comes to.
    routed = any(op.op_name == "moe_experts" and op.sites for op in binding.plan.ops)
    allowed = 0.6 if routed else 0.05
    worse = {n: (share, from_eager[n]) for n, share in from_bound.items() if share > 2 * from_eager[n] + allowed}
    assert not worse


def _eager(model: PreTrainedModel) -> PreTrainedModel:
    if model.config._attn_implementation is not None:
        model.set_attn_implementation("eager")
    return model


def test_the_types_that_are_left_out_are_few_and_exist():
    assert set(TYPES) >= NOT_RUN.keys()
    assert len(TYPES) - len(NOT_RUN) >= 155


@pytest.mark.thorough
def test_the_types_of_make_test_run_all_code_that_any_type_runs():
    found = {name: codes(tiny_model(name, torch.float32)) for name in TYPES if name not in NOT_RUN}
    missing = set().union(*found.values()) - set().union(*(found[name] for name in DISTINCT))
    assert not missing, f"DISTINCT in tests/distinct_code.py should be {' '.join(cover(found))}"
