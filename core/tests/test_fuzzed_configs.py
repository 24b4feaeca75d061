"""No value of ``model.ops_implementation`` ends in an untyped error, when it is checked and when it is planned with."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fuzzing import KEYS, TEXTS, VALUES, bounded, typed_errors
from veomni_core import Hardware, OpsConfig, Site, discover, plan_sites
from veomni_core.discovery.registry import Registry

FIELDS = ("attn_implementation", "cross_entropy_loss_implementation", "moe_implementation", "rms_norm_implementation")
SETTINGS = ("preset", "on_change", "training_logits")
KERNELS = ("torch", "sdpa", "chunk_loss", "eager", "auto", "triton", "npu", "fused", "acme", "alltoall_dedup")
NAMES = st.sampled_from(KERNELS) | TEXTS
OPTIONS = st.dictionaries(st.sampled_from(["chunk_rows", "rows"]) | KEYS, VALUES, max_size=3) | VALUES
ENTRIES = NAMES | st.fixed_dictionaries({"kernel": NAMES}, optional={"options": OPTIONS, "option": VALUES})
CHOICES = ENTRIES | st.lists(ENTRIES, max_size=3) | st.dictionaries(KEYS | NAMES, ENTRIES, max_size=3) | VALUES
PROFILES = st.dictionaries(
    st.sampled_from(["rms_norm", "attention"]) | KEYS, st.dictionaries(NAMES, VALUES, max_size=2) | VALUES, max_size=2
)
CONFIGS = (
    st.dictionaries(st.sampled_from(FIELDS), CHOICES, max_size=2)
    | st.dictionaries(st.sampled_from(SETTINGS) | KEYS, VALUES, max_size=2)
    | st.fixed_dictionaries({"profile": PROFILES | VALUES})
    | VALUES
)
SITES = [
    Site("rms_norm", "model.norm", "norm modules", "standard", "proven by value", "bfloat16", sizes={"width": [64]}),
    Site("attention", "model.layers.0.self_attn", "attention", "standard", "proven by value", "float32"),
]


@functools.cache
def plugins() -> Registry:
    """Those that are installed; a fixture would be printed with each example that fails."""
    return discover({})


@bounded(300)
@given(CONFIGS)
def test_a_config_is_checked_or_refused(config: Any) -> None:
    with typed_errors():
        OpsConfig.from_dict(config, plugins(), {})


@bounded(60)
@given(st.dictionaries(st.sampled_from(FIELDS), ENTRIES | st.lists(ENTRIES, min_size=1, max_size=2), max_size=3))
def test_a_checked_config_is_planned_or_refused(config: Any) -> None:
    with typed_errors():
        plan = plan_sites(SITES, OpsConfig.from_dict(config, plugins(), {}), hardware=Hardware.cpu())
        assert str(plan.table()) and plan.sha256
