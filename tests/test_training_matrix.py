"""Every way to train, with every kind of model: a bound model computes what the eager one does, or is refused."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch

from training_setups import (
    AUTO,
    DECODERS,
    FAMILIES,
    SETUPS,
    assert_as_accurate,
    assert_equal_steps,
    autocast,
    build,
    step,
    tokens,
)
from veomni_core import bind, binding_of


@pytest.mark.thorough(one_per=["setup"])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bound_model_trains_as_the_eager_one(family, setup):
    eager = setup.prepared(build(family), None)
    bound = setup.prepared(build(family), lambda model: bind(model, AUTO))
    assert_equal_steps(step(bound), step(eager))
    assert_equal_steps(step(bound), step(eager))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_weights_under_bf16_autocast(family):
    exact = step(build(family).train())
    eager, bound = build(family).train(), build(family).train()
    bind(bound, AUTO)
    with autocast():
        found, wanted = step(bound), step(eager)
    assert_as_accurate(found, wanted, exact)


@pytest.mark.thorough(one_per=["dtype"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_low_precision(family, dtype):
    exact = step(build(family, dtype).float().train())
    eager, bound = build(family, dtype).train(), build(family, dtype).train()
    bind(bound, AUTO)
    found, wanted = step(bound, scale=64.0), step(eager, scale=64.0)
    assert_as_accurate(found, wanted, exact)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_in_another_thread_while_training(family):
    bound, eager, ids = build(family).train(), build(family), tokens()
    bind(bound, AUTO)
    wanted = eager(input_ids=ids, labels=ids).logits
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            bound(input_ids=ids, labels=ids).loss.backward()

    evaluated = build(family)
    bind(evaluated, AUTO)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(5):
            logits = evaluated(input_ids=ids, labels=ids).logits
            assert type(logits) is torch.Tensor
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    finally:
        stop.set()
        thread.join()


@pytest.mark.thorough
def test_compiled_for_every_size():
    """With ``dynamic=True`` PyTorch makes each number that a forward closes over an input of the graph."""
    torch._dynamo.reset()
    bound, eager = build("qwen3").train(), build("qwen3").train()
    bind(bound, AUTO)
    step(bound)  # transformers installs its output recorders in the first forward
    compiled = torch.compile(bound, backend="aot_eager", dynamic=True)
    for ids in (tokens(), tokens(3, 12)):
        found, gradients = step(compiled, ids)
        own = {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}
        assert_equal_steps((found, own), step(eager, ids))


class _Loss(torch.nn.Module):
    """The loss of a model by token ids alone, as ``torch.export`` wants a module."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


def test_an_exported_step_has_the_eager_gradients():
    bound, eager = build("qwen3").train(), build("qwen3").train()
    bind(bound, AUTO)
    exported = torch.export.export(_Loss(bound), (tokens(),), strict=False).module()
    loss = exported(tokens(seed=4))
    loss.backward()
    found = {name.removeprefix("model."): p.grad for name, p in exported.named_parameters() if p.grad is not None}
    assert_equal_steps((loss.detach(), found), step(eager, tokens(seed=4)))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_moe"])
def test_a_step_without_memory(family):
    """On the meta device, as people estimate memory; transformers' own experts don't run there."""
    model, ids = build(family).train(), tokens().to("meta")
    bind(model, AUTO)
    model.to("meta")
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    assert output.logits.shape == (*ids.shape, 64)
    assert all(p.grad.is_meta and p.grad.shape == p.shape for p in model.parameters() if p.grad is not None)


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    level = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    level.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=level, pad_token="w0", eos_token="w2", unk_token="w0")


def _settings(folder: Path) -> dict[str, object]:
    return {
        "output_dir": str(folder),
        "max_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }


def _supervised(model, folder: Path):
    import datasets
    import trl

    rows = datasets.Dataset.from_dict({"input_ids": tokens(6, 9).tolist()})
    config = trl.SFTConfig(**_settings(folder), dataset_kwargs={"skip_prepare_dataset": True})
    return trl.SFTTrainer(model, config, train_dataset=rows, processing_class=_tokenizer())


def _preferences(model, folder: Path):
    import datasets
    import trl

    words = [" ".join(f"w{token}" for token in row) for row in tokens(12, 6).tolist()]
    rows = datasets.Dataset.from_dict({"prompt": words[:4], "chosen": words[4:8], "rejected": words[8:]})
    config = trl.DPOConfig(**_settings(folder))
    reference = copy.deepcopy(model).eval()  # of a bound model, a bound one
    return trl.DPOTrainer(model, reference, config, train_dataset=rows, processing_class=_tokenizer())


@pytest.mark.thorough
@pytest.mark.parametrize("trainer", [_supervised, _preferences], ids=["SFT", "DPO"])
@pytest.mark.parametrize("family", DECODERS)
def test_trl_trains_a_bound_model_as_the_eager_one(family, trainer, tmp_path):
    losses = []
    for bound in (True, False):
        model = build(family).train()
        if bound:
            bind(model, AUTO)
        trained = trainer(model, tmp_path / str(bound))
        trained.train()
        assert not bound or binding_of(trained.model) is not None
        losses.append([entry["loss"] for entry in trained.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
