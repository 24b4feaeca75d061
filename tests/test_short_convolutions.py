"""Short convolutions in modules of their own, as Inkling's. How they refuse packed sequences: test_hybrid_packing."""

from __future__ import annotations

import pytest

from counting_kernels import calls, counting_registry
from hybrid_models import LENGTHS, hybrid, tokens
from veomni_core import bind, find_sites

pytestmark = pytest.mark.thorough

ROW = tokens(1, sum(LENGTHS))


def inkling():
    model = hybrid("inkling_text")
    model.config.use_cache = False
    return model


def test_a_convolution_that_holds_no_linear_is_found_with_its_own_width():
    sites = {site.path: site for site in find_sites(inkling()) if site.op_name == "causal_conv1d"}
    assert {path.rpartition(".")[2] for path in sites} == {"k_sconv", "v_sconv", "attn_sconv", "mlp_sconv"}
    assert {site.variant for site in sites.values()} == {"standard"}
    assert sites["model.layers.0.attn_sconv"].sizes["channels"] == (64,)
    assert sites["model.layers.0.self_attn.k_sconv"].sizes["channels"] != (64,)


def test_each_runs_the_kernel():
    model = inkling()
    calls.clear()
    bind(model, {"preset": "eager", "causal_conv1d_implementation": "auto"}, registry=counting_registry("one"))
    model(ROW)
    assert calls[("causal_conv1d", "standard", "one")] == 4 * len(model.model.layers)
