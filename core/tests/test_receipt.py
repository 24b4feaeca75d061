"""What was bound and what was not, as the receipt and the log say it."""

from __future__ import annotations

import logging

from counting_kernels import calls, counting_registry
from models import build, step
from veomni_core import OpsConfig, bind

REGISTRY = counting_registry("one")


def test_per_module_choice(caplog):
    model = build("qwen3")
    config = {"preset": "eager", "rms_norm_implementation": {"*.q_norm": "one", "default": "eager"}}
    binding = bind(model, config, registry=REGISTRY)
    step(model)
    assert calls == {("rms_norm", "standard", "one"): 2}
    (op,) = [op for op in binding.receipt.to_dict()["ops"] if op["op"] == "rms_norm"]
    assert (op["bound"], op["found"]) == (2, 9) and len(op["eager"]) == 7
    assert not caplog.text  # those seven were asked to be


def test_modeling_backend_hf_turns_binding_off():
    model = build("llama")
    config = OpsConfig.from_dict({"preset": "auto"}, REGISTRY, environ={"MODELING_BACKEND": "hf"})
    binding = bind(model, config)
    step(model)
    assert not calls and not any(decision.bound for op in binding.plan.ops for decision in op.sites)


def test_the_receipt_names_what_was_left_eager_and_a_warning_says_so_once(caplog):
    model = build("seed_oss", residual_dropout=0.1)
    config = {"preset": "eager", "swiglu_mlp_implementation": ["one", "eager"], "rms_norm_implementation": "one"}
    with caplog.at_level(logging.WARNING):
        binding = bind(model, config, registry=REGISTRY)
    (op,) = [op for op in binding.receipt.to_dict()["ops"] if op["op"] == "swiglu_mlp"]
    assert op["bound"] == 0 and op["found"] == 2
    assert op["eager"][0]["reason"] == "not proven: it draws random numbers in training mode"
    assert caplog.text.count("swiglu_mlp_implementation: 2 of 2 sites stay eager") == 1
    table = binding.receipt.table()
    assert "rms_norm_implementation" in table and "5/5" in table and "0/2" in table


def test_a_field_that_a_preset_filled_is_shown_with_the_preset_s_name():
    for config, preset in (({}, "auto"), ({"preset": "eager"}, "eager")):
        with bind(build("llama"), {**config, "rms_norm_implementation": "one"}, registry=REGISTRY) as binding:
            table, ops = binding.receipt.table(), {op["op"]: op for op in binding.receipt.to_dict()["ops"]}
        assert f"{preset} (preset {preset})" in table and "one (preset" not in table
        assert (ops["swiglu_mlp"]["preset"], ops["rms_norm"]["preset"]) == (preset, None)
        assert [ops[name]["written"] for name in ("swiglu_mlp", "rms_norm")] == [False, True]
