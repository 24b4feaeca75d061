"""Jobs that train models of images, video and audio on text: chats, adapters, packing, frozen towers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_tokenizers import byte_level, saved
from tiny_multimodal import text_batch, tiny_model

from veomni_core import bind
from veomni_core.errors import ConfigError, JobFileError, PackedSequencesError
from veomni_trainer.job.parameter_groups import ParameterGroup
from veomni_trainer.loop.optimizers import divide
from veomni_trainer.setup.packing import check_packing
from veomni_trainer.setup.towers import freeze
from veomni_transformers.build import load_as_trained
from veomni_transformers.towers.parts import towers

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]
CHATS = [
    {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
    for ask, answer in (
        ("What is the weather?", "sunny"),
        ("the quick brown", "fox and a dog"),
        ("hi", "a"),
        ("b", "c"),
    )
]


@pytest.fixture
def chats(tmp_path: Path, job_data: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Makes a job that trains a tiny model of a type on chats, of which the answers are learned."""

    def make(model_type: str) -> dict[str, Any]:
        tokenizer = byte_level()
        base = saved(tokenizer, tmp_path / "base")
        tiny_model(model_type, vocab_size=384).save_pretrained(base)
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in CHATS * 2), encoding="utf-8")
        job_data["model"] = {"weights": base, "ops_implementation": {"preset": "auto"}}
        job_data["data"] = {"files": "chats.jsonl", "sequence_length": 64}
        job_data["train"] |= {"steps": 2, "learning_rate": 0.01, "batch_size": 2}
        return job_data

    return make


@pytest.mark.parametrize("model_type", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.thorough)])
def test_chats_train_and_each_answer_s_token_counts_the_same(
    chats: Any, train: Train, losses: Losses, run: Path, model_type: str
) -> None:
    data = chats(model_type)
    train(data)
    whole = dict(losses(run))
    train(data, "train.batch_size=1", "train.gradient_accumulation=2", overwrite=True)
    assert dict(losses(run)) == pytest.approx(whole, rel=1e-4)


@pytest.mark.thorough
def test_a_loss_that_takes_no_count_of_labels_is_refused_where_a_step_has_several(
    chats: Any, train: Train, losses: Losses, run: Path
) -> None:
    data = chats("qwen2_audio")
    train(data)
    mean = dict(losses(run))
    with pytest.raises(
        ConfigError, match=r"Qwen2Audio\w+ computes each micro-batch's mean loss by itself.*one process"
    ):
        train(data, "train.gradient_accumulation=2", "train.batch_size=1", overwrite=True)
    train(data, "train.gradient_accumulation=2", "train.batch_size=1", "train.method=sft", overwrite=True)  # TRL's loss
    assert dict(losses(run)) == pytest.approx(mean, rel=1e-4)


MERGED = ("llama4", "mllama", "qwen3_vl", "internvl", "qwen3_omni_moe_thinker")


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_5", *(pytest.param(each, marks=pytest.mark.thorough) for each in MERGED)],
)
def test_a_merged_adapter_of_the_decoder_leaves_the_towers_as_they_were(
    chats: Any, train: Train, run: Path, model_type: str
) -> None:
    data = chats(model_type)
    data["lora"] = {"rank": 4, "exclude_modules": ["router"]}  # Llama 4's is a Linear that returns two tensors
    train(data, "train.export=merged")
    adapted = load_file(run / "checkpoint-2" / "adapter_model.safetensors")
    before, after = load_as_trained(Path(data["model"]["weights"])), load_as_trained(run / "model")
    beside = [path for paths in towers(before).values() for path in paths]
    assert beside and not [name for name in adapted if any(f".{path}." in name for path in beside)]
    assert type(after) is type(before)
    same = {name for name, value in before.state_dict().items() if torch.equal(value, after.state_dict()[name])}
    assert {name for name in before.state_dict() if any(name.startswith(path) for path in beside)} <= same
    assert len(same) < len(before.state_dict())


def test_towers_are_adapted_where_the_job_names_them(chats: Any, train: Train, run: Path) -> None:
    data = chats("llava")
    data["lora"] = {"rank": 4, "towers": ["projector"], "exclude_modules": ["o_proj"]}
    train(data, "train.steps=1")
    adapted = set(load_file(run / "checkpoint-1" / "adapter_model.safetensors"))
    assert any("multi_modal_projector" in name for name in adapted)
    assert not [name for name in adapted if "vision_tower" in name or "o_proj" in name]
    with pytest.raises(ConfigError, match=r"lora\.towers: .* no part 'audio'; beside .* it has: vision, projector"):
        train(data, "lora.towers=[audio]", overwrite=True)
    with pytest.raises(ConfigError, match=r"lora\.towers is for target_modules: all-linear"):
        train(data, "lora.target_modules=[q_proj]", overwrite=True)


@pytest.mark.thorough
def test_the_thinker_of_an_omni_folder_is_trained_and_exported(chats: Any, train: Train, run: Path) -> None:
    data = chats("qwen2_5_omni_thinker")
    folder = Path(data["model"]["weights"])
    weights = {f"thinker.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights | {"talker.norm.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniForConditionalGeneration"]}
    whole["thinker_config"] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    train(data, "train.export=true")
    assert type(load_as_trained(run / "model")).__name__ == "Qwen2_5OmniThinkerForConditionalGeneration"
    data["lora"] = {"rank": 4}
    train(data, "train.export=merged", overwrite=True)
    assert type(load_as_trained(run / "model")).__name__ == "Qwen2_5OmniThinkerForConditionalGeneration"


@pytest.mark.parametrize(
    "model_type", ["qwen3_vl", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("qwen3_vl_moe", "llava"))]
)
def test_packed_text_is_kept_apart_where_use_cache_is_the_text_config_s(model_type: str) -> None:
    model = tiny_model(model_type)
    model.config.get_text_config().use_cache = True
    check_packing(model, batch_size=2)


def test_packed_positions_of_three_rows_are_refused_and_of_four_kept_apart() -> None:
    model: Any = tiny_model("qwen3_vl").eval()
    ids = text_batch(1, 12)["input_ids"]
    rows = torch.cat([torch.arange(7), torch.arange(5)]).view(1, 1, 12)
    with bind(model, {"preset": "eager"}):
        alone = model(input_ids=ids[:, 7:]).logits
        packed = model(input_ids=ids, position_ids=rows.expand(4, 1, 12), use_cache=False).logits[:, 7:]
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
        with pytest.raises(
            PackedSequencesError, match="three rows, by which .* apart in Qwen3VLForConditionalGeneration"
        ):
            model(input_ids=ids, position_ids=rows.expand(3, 1, 12), use_cache=False)
        model(input_ids=ids, position_ids=torch.arange(12).expand(3, 1, 12))


def test_frozen_towers_are_not_trained(chats: Any, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    data = chats("llava")
    train(data, "train.freeze=[vision, projector]")
    assert "of them trained" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"train\.freeze: Llava\w+ has no part 'audio'; .* it has: vision, projector"):
        train(data, "train.freeze=[audio]", overwrite=True)
    with pytest.raises(ConfigError, match=r"\[vision, projector, text\] leaves nothing to train"):
        train(data, "train.freeze=[vision, projector, text]", overwrite=True)
    group = "train.parameter_groups=[{tower: vision, learning_rate: 1.0e-3}]"
    with pytest.raises(
        ConfigError, match=r"parameter_groups\.0: tower: vision: the model has no such tower that is tr"
    ):
        train(data, "train.freeze=[vision]", group, overwrite=True)
    with pytest.raises(JobFileError, match="needs either match, a glob of parameter names, or tower"):
        train(data, "train.parameter_groups=[{learning_rate: 1.0e-3}]", overwrite=True)


def test_a_group_has_the_parameters_of_its_tower() -> None:
    model = tiny_model("qwen2_5_omni_thinker")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    groups = [ParameterGroup(tower="audio", learning_rate=0.1), ParameterGroup(match="*.visual.*", learning_rate=0.2)]
    divide(optimizer, model, groups)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert {name: rate for name, rate in found.items() if rate < 1} == {
        name: 0.1 if "audio_tower" in name else 0.2 for name in found if "audio_tower" in name or ".visual." in name
    }


def test_frozen_towers_save_no_activations() -> None:
    saved_bytes = {}
    for kinds in ((), ("vision",), ("vision", "projector")):
        model: Any = tiny_model("llava")
        freeze(model, kinds)
        sizes: list[int] = []
        pixels = torch.randn(1, 3, 16, 16)

        def save(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            features = model.get_image_features(pixels).pooler_output
        assert all(each.requires_grad for each in features) == ("projector" not in kinds)
        saved_bytes[kinds] = sum(sizes)
    assert saved_bytes[()] > 5 * saved_bytes["vision",] > saved_bytes["vision", "projector"] == 0
