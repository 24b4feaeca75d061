"""``VeOmniCallback`` in transformers' ``Trainer``: the losses of the unbound run, and no half binding."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_training import AUTO, arguments, close, llama, measured, qwen3_moe, sequences, trainer
from torch.nn.parallel import DataParallel
from transformers import Trainer

from distributed import run_ranks
from veomni_bridges.transformers import VeOmniCallback
from veomni_core import OpsConfig, bind, binding_of
from veomni_core.errors import BindingError, ConfigError

SETTINGS = {
    "plain": {},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left():
    """Dynamo keeps what it compiled of ``LlamaForCausalLM.forward`` for the process, and another model's test meets it:
    saying why that doesn't fit, PyTorch 2.13 raises KeyError for a keyword argument that the new call leaves out.
    """
    yield
    torch.compiler.reset()


def run(model, folder, *callbacks, **changes) -> list[float]:
    training = trainer(model, folder, *callbacks, **changes)
    training.train()
    return measured(training)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_losses_are_those_of_the_unbound_run(tmp_path, settings):
    kernels = VeOmniCallback(**AUTO)
    model = llama()
    bound = run(model, tmp_path / "bound", kernels, **settings)
    assert close(bound, run(llama(), tmp_path / "eager", **settings))
    fields = {op.config_field for op in kernels.binding.plan.ops if op.chosen and op.chosen != ("eager",)}
    assert {"rms_norm_implementation", "cross_entropy_loss_implementation"} <= fields
    assert kernels.binding.active and not kernels.binding.receipt.changed


def test_a_model_with_experts_trains_on_its_kernel(tmp_path):
    kernels = VeOmniCallback(**AUTO)
    bound = run(qwen3_moe(), tmp_path / "bound", kernels)
    # Adam's first steps divide gradients by their own size, and so enlarge the rounding of the smallest.
    assert close(bound, run(qwen3_moe(), tmp_path / "eager"), 1e-4)
    assert "moe_experts" in {planned.spec.op_name for planned in kernels.binding.plan.kernels}


def test_bf16_is_planned_as_autocast(tmp_path):
    kernels = VeOmniCallback(**AUTO)
    bound = run(llama(), tmp_path / "bound", kernels, bf16=True)
    assert kernels.binding.plan.autocast == "bfloat16"
    assert close(bound, run(llama(), tmp_path / "eager", bf16=True), 2e-2)


def test_the_receipt_is_printed_once_and_written(tmp_path, capsys):
    kernels = VeOmniCallback(**AUTO)
    training = trainer(llama(), tmp_path, kernels)
    assert "Bound on cpu" not in capsys.readouterr().out and not list(tmp_path.iterdir())
    training.train()
    training.evaluate(sequences(4))
    assert capsys.readouterr().out.count("Bound on cpu") == 1
    written = json.loads((tmp_path / "veomni_receipt.json").read_text())
    assert written == {**kernels.binding.receipt.to_dict(), "notes": []}


def test_only_the_first_process_says_it(tmp_path, capsys):
    kernels = VeOmniCallback(**AUTO)
    training = trainer(llama(), tmp_path, kernels)
    state = SimpleNamespace(is_world_process_zero=False)
    kernels.on_train_begin(training.args, state, training.control, model=training.model)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_evaluating_alone_says_it_too_and_gives_eager_s_loss(tmp_path, capsys):
    bound = trainer(llama(), tmp_path, VeOmniCallback(**AUTO)).evaluate(sequences(4))
    assert capsys.readouterr().out.count("Bound on cpu") == 1
    eager = trainer(llama(), tmp_path).evaluate(sequences(4))
    assert close([bound["eval_loss"]], [eager["eval_loss"]])


@pytest.mark.thorough
def test_two_processes_train_as_without_the_callback(tmp_path):
    outputs = run_ranks(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from tiny_training import AUTO, close, llama, measured, trainer
        from veomni_bridges.transformers import VeOmniCallback

        runs = [trainer(llama(), {str(tmp_path)!r}, *callbacks) for callbacks in ([VeOmniCallback(**AUTO)], [])]
        for each in runs:
            each.train()
        bound, eager = map(measured, runs)
        print(type(runs[0].model_wrapped).__name__, close(bound, eager), eager)
        """
    )
    assert ["Bound on cpu" in output for output in outputs] == [True, False]  # the first process says it
    assert all("DistributedDataParallel True" in output for output in outputs), outputs


def test_a_resumed_run_goes_on_as_the_unbound_one(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = run(llama(), tmp_path / "whole")
    run(llama(), tmp_path / "bound", VeOmniCallback(**AUTO), **saving)
    resumed = trainer(llama(), tmp_path / "bound", VeOmniCallback(**AUTO), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "bound" / "checkpoint-2"))
    assert close(measured(resumed), whole)


def test_undo_gives_the_eager_model_back(tmp_path):
    model = llama()
    kernels = VeOmniCallback(**AUTO, undo=True)
    training = trainer(model, tmp_path, kernels)
    training.train()
    assert binding_of(model) is None and type(model) is type(llama())
    with pytest.raises(BindingError, match="its binding was undone"):
        training.train()


def test_a_config_that_was_checked_can_be_given():
    config = OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": "torch"})
    assert VeOmniCallback(config)._config is config
    with pytest.raises(ConfigError, match="not both: preset"):
        VeOmniCallback(config, preset="auto")


def test_a_wrong_config_stops_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match="tirton"):
        trainer(llama(), tmp_path, VeOmniCallback(rms_norm_implementation="tirton"))


def test_a_callback_that_comes_too_late_binds_nothing(tmp_path):
    model = llama()
    training = trainer(model, tmp_path)
    training.add_callback(VeOmniCallback(**AUTO))
    with pytest.raises(BindingError, match=r"too late.*Trainer\(callbacks="):
        training.train()
    assert binding_of(model) is None


def test_a_model_made_anew_by_model_init_is_refused(tmp_path):
    training = Trainer(
        args=arguments(tmp_path),
        model_init=lambda: llama(),
        train_dataset=sequences(),
        callbacks=[VeOmniCallback(**AUTO)],
    )
    with pytest.raises(BindingError, match="call bind in model_init"):
        training.train()


def test_a_model_that_is_bound_already_is_refused(tmp_path):
    model = llama()
    binding = bind(model, AUTO)
    with pytest.raises(BindingError, match="bound already"):
        trainer(model, tmp_path, VeOmniCallback(**AUTO))
    assert binding.active


def test_every_reason_against_binding_is_said_at_once(tmp_path):
    args = arguments(tmp_path, use_liger_kernel=False)
    args.use_liger_kernel, args.deepspeed_plugin, args.fsdp_plugin_args = True, object(), {"fsdp_version": 1}
    model = llama()
    with pytest.raises(BindingError, match=r"DataParallel.*DeepSpeed.*FSDP 1.*use_liger_kernel"):
        VeOmniCallback(**AUTO).on_init_end(args, None, None, model=DataParallel(model))
    assert binding_of(model) is None


def test_a_compiled_model_is_refused(tmp_path):
    model = torch.compile(llama(), backend="eager")
    with pytest.raises(BindingError, match="torch_compile=True"):
        VeOmniCallback(**AUTO).on_init_end(arguments(tmp_path), None, None, model=model)


def test_a_model_with_forwards_of_liger_is_refused(tmp_path):
    liger, model = pytest.importorskip("liger_kernel.transformers"), llama()
    model.model.norm = liger.LigerRMSNorm(model.config.hidden_size)
    with pytest.raises(BindingError, match="forwards of liger_kernel are in the model already"):
        trainer(model, tmp_path, VeOmniCallback(**AUTO))
