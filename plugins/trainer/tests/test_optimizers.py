"""Optimizers, schedules and groups of parameters: what a job can name, what is refused, and what a step does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.training_args import OptimizerNames

from veomni_core import Hardware
from veomni_core.errors import ConfigError, HostError, VeOmniError
from veomni_trainer.job.load import dump_job, parse_job
from veomni_trainer.job.precision import PRECISIONS, PrecisionName, gradient_and_state_bytes
from veomni_trainer.loop import optimizers
from veomni_trainer.loop.optimizers import (
    MuonWithAdamW,
    check_optimizer,
    check_schedule,
    hidden_matrices,
    optimizer_for,
    optimizer_names,
    schedule_names,
)
from veomni_trainer.run.check import check_job
from veomni_trainer.setup.conditions import with_machine_defaults

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt optimizer": ({"optimizer": "adamw_torhc"}, "'adamw_torhc' is unknown. Did you mean 'adamw_torch'?"),
    "an optimizer of its own loop": (
        {"optimizer": "lomo"},
        "train.optimizer: lomo updates weights during the backward",
    ),
    "an unknown option": (
        {"optimizer": {"name": "adamw_torch", "beta": [0.9, 0.95]}},
        "train.optimizer.beta: adamw_torch has no such option. Did you mean 'betas'?",
    ),
    "an option that is a key": (
        {"optimizer": {"name": "muon", "lr": 1e-3}},
        "train.optimizer.lr: write train.learning_rate",
    ),
    "options of nothing": ({"optimizer": {"betas": [0.9, 0.95]}}, "a mapping needs the optimizer's name"),
    "a misspelt schedule": ({"schedule": "cosin"}, "train.schedule: 'cosin' is unknown. Did you mean 'cosine'?"),
    "a schedule without steps": ({"schedule": "greedy"}, "greedy goes by the validation loss instead of the steps"),
    "an unknown option of a schedule": (
        {"schedule": "polynomial", "schedule_options": {"pover": 2}},
        "train.schedule_options.pover: polynomial has no such option. Did you mean 'power'?",
    ),
    "an option that is missing": (
        {"schedule": "warmup_stable_decay"},
        "train.schedule_options: warmup_stable_decay can't be made of them",
    ),
    "both lengths": ({"epochs": 1}, "train: needs either steps or epochs, and not both"),
    "a warm-up of half a step": ({"warmup": 1.5}, "train.warmup: must be an integer or less than 1, got 1.5"),
    "a text for a number": (
        {"optimizer": {"name": "adamw_torch", "eps": "small"}},
        "train.optimizer: adamw_torch can't be made with these options: '<=' not supported",
    ),
    "a number for a pair": (
        {"optimizer": {"name": "muon", "betas": 0.9}},
        "train.optimizer: muon can't be made with these options: ",
    ),
    "a text for a switch": (
        {"optimizer": {"name": "sgd", "momentum": "9e-1", "nesterov": "yes"}},
        "train.optimizer.nesterov: sgd takes such as False for it, got 'yes' (text)",
    ),
    "clipping to nothing": ({"max_grad_norm": 0}, "train.max_grad_norm: must be above 0; off leaves gradients as"),
    "a glob of nothing": (
        {"parameter_groups": [{"match": "model.nrm.weight", "weight_decay": 0}]},
        "'model.nrm.weight': no trained parameter has such a name. Did you mean 'model.norm.weight'?",
    ),
    "a glob that comes too late": (
        {"parameter_groups": [{"match": "*", "weight_decay": 0}, {"match": "*norm*", "weight_decay": 0.1}]},
        "train.parameter_groups.1: match: '*norm*': every parameter that it matches, such as model.layers.0.",
    ),
    "a group without a change": ({"parameter_groups": [{"match": "*"}]}, "train.parameter_groups.0: changes nothing"),
    "a misspelt key of a group": (
        {"parameter_groups": [{"match": "*", "weight_dcay": 0}]},
        "train.parameter_groups.0.weight_dcay: there is no such key. Did you mean 'weight_decay'?",
    ),
    "an early stop without validation": ({"early_stop": {"patience": 2}}, "set train.validate_every"),
    "an optimizer that is not tested on shards": (
        {"fsdp_size": 2, "optimizer": "muon"},
        "train.optimizer: muon is not tested on sharded models; write adamw_torch_fused or adamw_torch",
    ),
    "groups of shards": (
        {"fsdp_size": 2, "parameter_groups": [{"match": "*", "weight_decay": 0}]},
        "train.parameter_groups: a sharded model's parameters can't be divided into groups yet",
    ),
    "loss scaling over shards": ({"fsdp_size": 2, "precision": "fp16_mixed"}, "gradients lie in several"),
}


@pytest.mark.parametrize("keys, message", REFUSED.values(), ids=REFUSED)
def test_plan_and_train_refuse_alike(
    job_data: dict[str, Any],
    write_job: Callable[[dict[str, Any]], Path],
    train: Train,
    run: Path,
    keys: dict[str, Any],
    message: str,
) -> None:
    job_data["train"] |= keys
    with pytest.raises(VeOmniError) as planned:
        check_job(write_job(job_data), Hardware.cpu())
    assert message in str(planned.value)
    with pytest.raises(ConfigError) as trained:
        train(job_data)
    assert str(trained.value) == str(planned.value)
    assert not run.exists()


def test_a_package_that_is_missing_is_named_where_the_job_trains(
    job_data: dict[str, Any],
    write_job: Callable[[dict[str, Any]], Path],
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    job_data["train"]["optimizer"] = "adamw_8bit"
    with pytest.raises(
        HostError, match=r"train\.optimizer: adamw_8bit can't be used here: You need to install `bitsan"
    ):
        train(job_data)
    check_job(write_job(job_data), Hardware.named("h200"))  # the machine that has one may have the package


@pytest.mark.parametrize(
    "schedule", [name for name in schedule_names() if name not in ("cosine_with_min_lr", "warmup_stable_decay")]
)
def test_every_schedule_with_defaults_is_taken(
    job_data: dict[str, Any], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "_WITHOUT_OPTIONS", ())  # also those that are known without transformers
    job_data["train"]["schedule"] = schedule
    if schedule == "cosine_warmup_with_min_lr":
        job_data["train"]["schedule_options"] = {"min_lr_rate": 0.1}
    check_schedule(parse_job(job_data).train)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_what_is_checked_as_torch_s_adamw_is_trained_with_it(job_data: dict[str, Any], name: str) -> None:
    job_data["train"]["optimizer"] = {"name": name, "amsgrad": True}
    train = parse_job(job_data).train
    check_optimizer(train)
    kind, arguments = optimizer_for(train, torch.nn.Linear(2, 2))
    assert kind is torch.optim.AdamW and arguments["amsgrad"] is True
    assert list(optimizers._TORCH_ADAMW) == ["adamw_torch", "adamw_torch_fused"]


def test_options_are_numbers_as_the_learning_rate_is(job_data: dict[str, Any]) -> None:
    for name, options in {"adamw_torch": {"eps": "1e-8", "betas": ["9e-1", 0.99]}, "sgd": {"momentum": "9e-1"}}.items():
        job_data["train"]["optimizer"] = {"name": name, **options}
        train = parse_job(job_data).train
        check_optimizer(train)
        assert all(isinstance(each, (float, list)) for each in train.optimizer_options.values())


def test_switched_off_survives_the_dump(job_data: dict[str, Any], tmp_path: Path) -> None:
    job_data["train"] |= {"max_grad_norm": None, "parameter_groups": [{"match": "*", "weight_decay": 0}]}
    job = parse_job(job_data)
    assert job.train.max_grad_norm is False
    assert parse_job(yaml.safe_load(dump_job(job))) == job


def test_the_machine_decides_what_a_job_leaves_out(job_data: dict[str, Any]) -> None:
    def defaults(name: str) -> tuple[Any, Any]:
        hardware = Hardware("npu") if name == "npu" else Hardware.named(name)
        train = with_machine_defaults(parse_job(job_data), hardware).train
        return train.precision, train.optimizer

    assert defaults("h200") == defaults("mi300x") == ("bf16_mixed", "adamw_torch_fused")
    assert defaults("t4") == defaults("cpu") == ("float32", "adamw_torch_fused")
    assert defaults("npu") == ("bf16_mixed", "adamw_torch")
    job_data["train"] |= {"precision": "bf16", "optimizer": "sgd"}
    assert defaults("h200") == ("bf16", "sgd")


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """With matrices that are large enough for states of 8 bits."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes))


def stepped(kind: Any, arguments: dict[str, Any], parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer after a step on ones."""
    optimizer: torch.optim.Optimizer = kind([{"params": parameters, "weight_decay": 0.1}], **arguments)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", optimizer_names())
def test_a_parameter_costs_what_its_optimizer_keeps(
    job_data: dict[str, Any], llama: LlamaForCausalLM, name: str, precision: PrecisionName
) -> None:
    if "bit" in name or "bnb" in name or "ademamix" in name:
        pytest.importorskip("bitsandbytes")
    if name.startswith("paged"):
        pytest.skip("pages of an accelerator's memory")
    job_data["train"] |= {"optimizer": name}
    try:
        kind, arguments = optimizer_for(parse_job(job_data).train, llama)
    except HostError as error:
        pytest.skip(str(error))
    weight = torch.nn.Parameter(torch.ones(128, 64, dtype=getattr(torch, PRECISIONS[precision].weights)))
    if name == "muon":
        arguments["matrices"] = {id(weight)}
    state = stepped(kind, arguments, [weight]).state[weight]
    kept = sum(value.nbytes for key, value in state.items() if torch.is_tensor(value) and "map" not in key)
    gradient, remembered = gradient_and_state_bytes(precision, name)
    assert kept / weight.numel() == pytest.approx(remembered, abs=0.15)
    assert gradient == weight.element_size()


def test_a_parameter_under_autocast_costs_what_its_float32_weight_costs() -> None:
    assert gradient_and_state_bytes("bf16_mixed", "adamw_torch_fused") == (4, 8)
    assert gradient_and_state_bytes("bf16", "adamw_torch_fused") == (2, 4)
    assert gradient_and_state_bytes("fp16_mixed", "lion_8bit") == (4, pytest.approx(1 + 4 / 256))


def test_muon_has_the_hidden_matrices_and_adamw_the_rest(llama: LlamaForCausalLM, job_data: dict[str, Any]) -> None:
    job_data["train"] |= {"optimizer": {"name": "muon", "momentum": 0.9, "betas": [0.8, 0.9]}}
    kind, arguments = optimizer_for(parse_job(job_data).train, llama)
    names = {name for name, weight in llama.named_parameters() if id(weight) in hidden_matrices(llama)}
    assert {name.split(".")[-2] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }

    def trained(optimizers: Callable[[LlamaForCausalLM], list[torch.optim.Optimizer]]) -> dict[str, torch.Tensor]:
        model = LlamaForCausalLM(llama.config)
        model.load_state_dict(llama.state_dict())
        parts = optimizers(model)
        ids = torch.arange(48).view(2, 24)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            for part in parts:
                part.step()
                part.zero_grad()
        return model.state_dict()

    def together(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
        _, arguments = optimizer_for(parse_job(job_data).train, model)
        first = MuonWithAdamW([{"params": list(model.parameters()), "weight_decay": 0.1}], **arguments)
        second = MuonWithAdamW([{"params": list(model.parameters()), "weight_decay": 0.1}], **arguments)
        second.load_state_dict(first.state_dict())  # as a resumed run does
        return [second]

    def apart(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
        matrices = [weight for name, weight in model.named_parameters() if name in names]
        others = [weight for name, weight in model.named_parameters() if name not in names]
        scale = "match_rms_adamw"
        return [
            torch.optim.Muon(matrices, 1e-3, momentum=0.9, weight_decay=0.1, adjust_lr_fn=scale),
            torch.optim.AdamW(others, 1e-3, betas=(0.8, 0.9), weight_decay=0.1),
        ]

    assert kind is MuonWithAdamW and arguments["momentum"] == 0.9
    torch.testing.assert_close(trained(together), trained(apart), rtol=0, atol=0)


@pytest.mark.thorough
def test_a_run_with_muon_and_groups_is_resumed_exactly(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    groups = [{"match": "*.layers.0.*", "learning_rate": 1e-4}, {"match": "*norm.weight", "weight_decay": 0.05}]
    job_data["train"] |= {"optimizer": "muon", "parameter_groups": groups, "save_every": 2, "keep_checkpoints": 9}
    train(job_data)
    whole = losses(run)
    saved = torch.load(run / "checkpoint-4" / "optimizer.pt", weights_only=True)["param_groups"]
    said = {(group["algorithm"], group.get("match"), group["initial_lr"], group["weight_decay"]) for group in saved}
    assert said == {
        ("muon", None, 1e-3, 0.1),
        ("muon", None, 1e-3, 0.0),
        ("muon", "*.layers.0.*", 1e-4, 0.1),
        ("adamw", None, 1e-3, 0.1),
        ("adamw", None, 1e-3, 0.0),
        ("adamw", "*.layers.0.*", 1e-4, 0.0),
        ("adamw", "*norm.weight", 1e-3, 0.05),
    }
    shutil.rmtree(run / "checkpoint-4")
    train(job_data, resume=True)
    assert losses(run) == whole


def test_every_name_of_transformers_is_taken_or_refused_with_a_reason(job_data: dict[str, Any]) -> None:
    refused = {}
    for name in OptimizerNames:
        job_data["train"]["optimizer"] = name.value
        try:
            check_optimizer(parse_job(job_data).train)
        except VeOmniError as error:
            refused[name.value] = str(error)
    reasons = ("can't be used here: ", "Write another one, such as adamw_torch_fused")
    assert all(any(reason in message for reason in reasons) for message in refused.values())
    assert "adamw_torch" not in refused and "lomo" in refused
