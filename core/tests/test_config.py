"""The job's config: every form of value, presets, legacy names, and what is wrong with a bad one."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from veomni_core import OpsConfig, OpsImplementationConfig, OpSlot
from veomni_core.discovery.discover import discover
from veomni_core.errors import BindingError, ConfigError, JobFileError, MissingOpsImplementationError, UnknownNameError
from veomni_ops.catalog import OPS
from veomni_transformers.veomni_jobs import warn_of_removed_variables

GPU_DEFAULTS = {
    "attention": "flash_attention_2",
    "causal_conv1d": "eager",
    "chunk_gated_delta_rule": "eager",
    "cross_entropy_loss": "liger_kernel",
    "kda": "eager",
    "linear": "eager",
    "load_balancing_loss": "triton",
    "mamba2_scan": "eager",
    "dsa_indexer": "eager",
    "dsa_attention": "eager",
    "moe_experts": "fused_triton",
    "rms_norm": "liger_kernel",
    "rms_norm_gated": "eager",
    "rotary_pos_emb": "liger_kernel",
    "rotary_pos_emb_vision": "eager",
    "selective_scan": "eager",
    "swiglu_mlp": "liger_kernel",
    "token_dispatch": "eager",
    "token_logprobs": "eager",
}
ON_REQUEST = ("linear", "token_logprobs")
# As they stand in VeOmni's own guides.
GUIDE_YAMLS = [
    "attn_implementation: flash_attention_2    # default",
    "cross_entropy_loss_implementation: liger_kernel   # default",
    "rms_norm_implementation: liger_kernel\n    swiglu_mlp_implementation: liger_kernel\n"
    "    rotary_pos_emb_implementation: liger_kernel",
    "load_balancing_loss_implementation: triton   # default",
    "moe_implementation: fused_triton   # Triton group-gemm (GPU, SM70+)",
    "moe_implementation: fused_quack",
    "attn_implementation: flash_attention_2\n    moe_implementation: fused_triton\n"
    "    cross_entropy_loss_implementation: liger_kernel\n    rms_norm_implementation: liger_kernel\n"
    "    swiglu_mlp_implementation: eager           # disable Liger for MLP only\n"
    "    rotary_pos_emb_implementation: liger_kernel\n    load_balancing_loss_implementation: triton",
]


def test_veomnis_class_is_a_checked_config_with_fields_as_arguments_and_attributes():
    ops = OpsImplementationConfig(preset="eager", rms_norm_implementation=["quack", "torch"])
    assert isinstance(ops, OpsConfig) and OpsConfig.of(ops) is ops
    assert (ops.rms_norm_implementation, ops.attn_implementation, ops.preset) == (["quack", "torch"], "eager", "eager")
    assert OpsImplementationConfig.from_dict({"preset": "gpu"}).moe_implementation == "fused_triton"
    assert ops.with_value("rms_norm_implementation", "torch").choices["rms_norm"].names == ("torch",)
    assert copy.copy(ops).choices == ops.choices
    with pytest.raises(UnknownNameError, match="rms_norm_implementaton: no such field. Did you mean"):
        OpsImplementationConfig(rms_norm_implementaton="torch")
    with pytest.raises(AttributeError, match="has no field 'rms_norm'"):
        ops.rms_norm  # noqa: B018


def test_veomnis_class_is_copied_and_replaced_and_never_changed_without_a_word():
    ops = OpsImplementationConfig(preset="eager", rms_norm_implementation="torch", require="deterministic")
    for same in (copy.copy(ops), copy.deepcopy({"ops": ops})["ops"], pickle.loads(pickle.dumps(ops))):
        assert same == ops and isinstance(same, OpsImplementationConfig) and same.require == ("deterministic",)
    other = dataclasses.replace(ops, rms_norm_implementation="eager", on_change="eager")
    assert (other.rms_norm_implementation, other.on_change, other.require) == ("eager", "eager", ops.require)
    assert other.choices["rms_norm"].names == ("eager",) and ops.rms_norm_implementation == "torch"
    with pytest.raises(UnknownNameError, match="rms_norm_implementaton: no such field. Did you mean"):
        dataclasses.replace(ops, rms_norm_implementaton="eager")
    with pytest.raises(AttributeError, match=r"write dataclasses.replace\(ops, rms_norm_implementation='eager'\)"):
        ops.rms_norm_implementation = "eager"
    for fields in ("sdpa", {"attn_implementation": "sdpa"}):
        with pytest.raises(ConfigError, match=r"fields have names: write OpsImplementationConfig\(preset="):
            OpsImplementationConfig(fields)


@pytest.mark.parametrize(
    "op, name, field, value",
    [
        ("rms_norm", "liger", "rms_norm_implementation", "liger_kernel"),
        ("apply_rotary_pos_emb", "triton", "rotary_pos_emb_implementation", "triton"),
        ("moe_load_balancing_loss", "eager", "load_balancing_loss_implementation", "eager"),
        ("moe_experts", "fused", "moe_implementation", "fused_triton"),
        ("moe_experts", "fused_quack", "moe_implementation", "fused_quack"),
        ("moe_experts", "quack", "moe_implementation", "fused_quack"),
    ],
)
def test_a_slot_that_is_bound_by_name_is_answered_with_the_line_that_works(op, name, field, value):
    with pytest.raises(BindingError) as raised:
        OpSlot(op).bind(name)
    line = str(raised.value).partition("binds it by its name: ")[2]
    assert line == f"veomni_core.bind(model, {{'{field}': '{value}'}})"
    assert OpsConfig.from_dict({"preset": "eager", field: value})


def test_a_field_may_be_allowed_to_be_unused():
    config = {"preset": "eager", "rms_norm_implementation": "torch"}
    for allowed, fields in ((["rms_norm_implementation"], 1), ([], 0), (False, 0), (None, 0)):
        assert len(OpsConfig.from_dict({**config, "allow_unused": allowed}).allow_unused) == fields
    assert {*OpsConfig.from_dict({**config, "allow_unused": True}).allow_unused} >= {"moe_implementation"}
    with pytest.raises(UnknownNameError, match="allow_unused: 'rms_norm' is unknown. Did you mean 'rms_norm_im"):
        OpsConfig.from_dict({**config, "allow_unused": ["rms_norm"]})
    with pytest.raises(UnknownNameError, match="allow_unused: {} is unknown"):
        OpsConfig.from_dict({**config, "allow_unused": [{}]})
    for wrong in ("yes", {"rms_norm_implementation": True}, 1):
        with pytest.raises(ConfigError, match="allow_unused: expected true, false, or a list of fields, got"):
            OpsConfig.from_dict({**config, "allow_unused": wrong})


def test_without_a_preset_what_is_not_written_is_auto():
    config = OpsConfig.from_dict({"moe_implementation": "fused_triton"})
    assert config.preset == "auto"
    assert config.choices["moe_experts"].names == ("fused_triton",)
    filled = {op: choice.asked for op, choice in config.choices.items() if not choice.written}
    assert {filled.pop(name) for name in ON_REQUEST} == {"eager"}
    assert set(filled.values()) == {"auto"}
    assert config == OpsConfig.from_dict({"preset": "auto", "moe_implementation": "fused_triton"})


def test_the_gpu_preset_is_exactly_the_guides_defaults():
    config = OpsConfig.from_dict({"preset": "gpu"})
    assert {choice.preset for choice in config.choices.values()} == {"gpu"}
    assert {op: choice.asked for op, choice in config.choices.items()} == GPU_DEFAULTS
    assert not any(choice.written for choice in config.choices.values())


@pytest.mark.parametrize("preset", ["auto", "eager"])
def test_a_preset_fills_what_is_not_written(preset):
    config = OpsConfig.from_dict({"preset": preset, "rms_norm_implementation": "liger_kernel"})
    assert config.choices["rms_norm"].names == ("liger_kernel",)
    assert config.choices["swiglu_mlp"].names == (preset,)


@pytest.mark.parametrize(
    "fields",
    [
        {op.config_field: GPU_DEFAULTS[op.name] for op in OPS if op.default != "eager"},
        {"moe_implementation": "fused"},
        {"attn_implementation": {"*": ["veomni_flash_attention_2_with_sp", "eager"]}},
    ],
)
def test_a_job_for_veomni_without_a_preset_is_told_which_line_to_write(fields, recwarn):
    config = OpsConfig.from_dict(fields)
    (said,) = [str(warning.message) for warning in recwarn if "preset" in str(warning.message)]
    assert said.startswith("ops_implementation names no preset, so the fields that it leaves out are auto: ")
    assert said.endswith("Write `preset: auto` to keep that, or `preset: gpu` for VeOmni's own defaults")
    left_out = [choice for choice in config.choices.values() if not choice.written and choice.op_name not in ON_REQUEST]
    assert all(choice.config_field in said for choice in left_out)
    assert not any(f"{name}_implementation" in said for name in ON_REQUEST)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"moe_implementation": "fused_triton"},
        {"preset": "gpu", "moe_implementation": "fused"},
        {op.config_field: "eager" for op in OPS},
    ],
)
def test_any_other_job_is_told_nothing_of_presets(fields, recwarn):
    OpsConfig.from_dict(fields, discover({"VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1"}))
    assert not [warning for warning in recwarn if "preset" in str(warning.message)]


@pytest.mark.parametrize("fields", GUIDE_YAMLS)
def test_the_guides_yamls_parse_unchanged(fields, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(f"model:\n  ops_implementation:\n    {fields}\n")
    config = OpsConfig.from_yaml(path)
    for line in fields.splitlines():
        name, _, value = line.partition("#")[0].strip().partition(": ")
        choice = next(choice for choice in config.choices.values() if choice.config_field == name)
        assert (choice.asked, choice.written) == (value, True)


def test_a_list_is_an_order_of_preference():
    config = OpsConfig.from_dict({"rms_norm_implementation": ["quack", "liger_kernel", "eager"]})
    assert config.choices["rms_norm"].group_for("any").names == ("quack", "liger_kernel", "eager")


def test_a_mapping_chooses_per_module_and_the_first_glob_wins():
    value = {"*.q_norm": "quack", "*norm": ["liger_kernel", "eager"], "default": "auto"}
    choice = OpsConfig.from_dict({"rms_norm_implementation": value}).choices["rms_norm"]
    groups = [choice.group_for(path) for path in ("layers.0.self_attn.q_norm", "model.norm", "elsewhere")]
    assert [group.glob for group in groups] == ["*.q_norm", "*norm", None]
    assert [group.names for group in groups] == [("quack",), ("liger_kernel", "eager"), ("auto",)]
    assert choice.names == ("auto", "quack", "liger_kernel", "eager")


def test_a_mapping_without_a_default_leaves_the_rest_eager():
    choice = OpsConfig.from_dict({"rms_norm_implementation": {"*.q_norm": "quack"}}).choices["rms_norm"]
    assert choice.group_for("model.norm").names == ("eager",)


def test_fused_is_answered_by_its_present_name():
    with pytest.warns(FutureWarning, match="moe_implementation: fused is now called fused_triton"):
        config = OpsConfig.from_dict({"moe_implementation": "fused"})
    assert config.choices["moe_experts"].names == ("fused_triton",)


def test_a_checked_config_brings_its_registry_and_another_one_is_refused():
    ours, others = discover(), discover({"VEOMNI_PLUGINS": "veomni-torch"})
    config = OpsConfig.from_dict({"preset": "auto"}, ours)
    assert OpsConfig.of(config) is config and OpsConfig.of(config, ours) is config
    with pytest.raises(ConfigError, match="checked against other plugins than those of registry=: leave registry out"):
        OpsConfig.of(config, others)
    assert OpsConfig.of({"preset": "auto"}, others).registry is others


@pytest.mark.parametrize("number", [2, 3, 4])
def test_attention_s_names_of_veomni_s_own_trainer_are_answered_by_the_kernel_s(number):
    retired, present = f"veomni_flash_attention_{number}_with_sp", f"flash_attention_{number}"
    with pytest.warns(FutureWarning, match=f"attn_implementation: {retired} is now called {present}"):
        config = OpsConfig.from_dict({"attn_implementation": retired})
    assert config.choices["attention"].names == (present,)
    with pytest.warns(FutureWarning, match=retired):
        config = OpsConfig.from_dict({"preset": "eager"}).with_value("attn_implementation", [retired, "eager"])
    assert config.choices["attention"].names == (present, "eager")


@pytest.mark.parametrize(
    "variable, field",
    [
        ("VEOMNI_USE_LIGER_KERNEL", "rms_norm_implementation"),
        ("USE_GROUP_GEMM", "moe_implementation"),
        ("VEOMNI_ENABLE_CHUNK_LOSS", "cross_entropy_loss_implementation: chunk_loss"),
    ],
)
def test_a_removed_variable_is_answered_by_the_field(variable, field):
    with pytest.warns(FutureWarning, match=f"{variable} no longer has any effect; write .*{field}"):
        warn_of_removed_variables({variable: "1"})


@pytest.mark.parametrize(
    "data, message",
    [
        ({"rms_norm_implementaton": "torch"}, "rms_norm_implementaton: no such field. Did you mean 'rms_norm_impl"),
        ({"mhc_implementation": "eager"}, "In VeOmni it chooses manifold-constrained hyper-connections"),
        ({"rms_norm_implementation": "ligr_kernel"}, "'ligr_kernel' is unknown. Did you mean 'liger_kernel'"),
        ({"rms_norm_implementation": ["torch", "tritn"]}, "'tritn' is unknown. Did you mean 'triton'"),
        ({"rms_norm_implementation": {"*": "quak"}}, r"rms_norm_implementation\['\*'\]: 'quak' is unknown"),
        ({"preset": "cpu"}, "preset: 'cpu' is unknown"),
        ({"profile": {"rms_nom": {}}}, "op 'rms_nom' is not registered. Did you mean 'rms_norm'"),
        ({"profile": {"rms_norm": {"tritn": 1.0}}}, "profile.rms_norm: 'tritn' is unknown. Did you mean 'triton'"),
    ],
)
def test_unknown_names_are_answered_by_the_nearest(data, message):
    with pytest.raises(UnknownNameError, match=message):
        OpsConfig.from_dict(data)


@pytest.mark.parametrize("value", [True, 3, None, [], [1], {"*": False}])
def test_a_value_of_the_wrong_type_is_refused(value):
    wanted = r"expected a kernel's name, \{kernel: name, .*\}, a list of these, or a mapping"
    with pytest.raises(ConfigError, match=wanted) as error:
        OpsConfig.from_dict({"rms_norm_implementation": value})
    assert ("Leave the field out" in str(error.value)) == (value is None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -5.0, True, "1 ms", None])
def test_a_measured_time_that_is_none_is_refused(value):
    wanted = f"profile.rms_norm.torch: expected milliseconds, got {'nothing' if value is None else repr(value)}"
    with pytest.raises(ConfigError, match=wanted):
        OpsConfig.from_dict({"profile": {"rms_norm": {"torch": value, "eager": 0.0}}})


@pytest.mark.parametrize(
    "data", [None, [], "auto", {"model": {}}, {"model": None}, {"model": {"ops_implementation": None}}]
)
def test_a_missing_section_is_never_all_eager(data):
    with pytest.raises(MissingOpsImplementationError, match="the section has no default"):
        OpsConfig.from_dict(data)


def test_modeling_backend():
    assert OpsConfig.from_dict({}, environ={"MODELING_BACKEND": "hf"}).backend == "hf"
    assert OpsConfig.from_dict({}, environ={}).backend == "veomni"
    with pytest.raises(UnknownNameError, match="MODELING_BACKEND: 'HF' is unknown. Did you mean|Known"):
        OpsConfig.from_dict({}, environ={"MODELING_BACKEND": "HF"})


@pytest.mark.parametrize(
    "text, message",
    [
        ("model:\n  a: 1\n  a: 2\n", r"line 3, column 3: key 'a' appears twice, first in line 2"),
        ("model: [1, 2\ntrain: x\n", r"line 2, column 6: "),
        ("model:\n\tops: 1\n", r"line 2, column 1: found character '\\t'"),
        ("", "this is empty"),
        ("- a\n- b\n", "this holds a list"),
    ],
)
def test_a_bad_yaml_is_answered_with_line_and_column(tmp_path, text, message):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobFileError, match=message):
        OpsConfig.from_yaml(path)


def test_a_missing_or_binary_yaml(tmp_path):
    with pytest.raises(JobFileError, match="there is no such file"):
        OpsConfig.from_yaml(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobFileError, match="cannot be read as text"):
        OpsConfig.from_yaml(tmp_path / "binary.yaml")
