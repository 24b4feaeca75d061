"""``veomni checkpoint`` on checkpoints that a plugin's converter reads."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from moe_checkpoints import saved, tensors_in
from safetensors.torch import save_file

from veomni_core.errors import CheckpointError
from veomni_tools.checkpoints import converted_files
from veomni_tools.cli.checkpoint import convert, inspect, verify

# The two halves of gate_up under names of their own, and down transposed: [E, I, H] as w1 and w3, [E, I, H] as w2.
PLUGIN = """
    from veomni_core import ModelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 2

    @hookimpl
    def veomni_models():
        return [ModelSpec(each, converter="{module}:make") for each in ("qwen3_moe", "qwen3_vl_moe")]

    def make(model):
        text = getattr(model.config, "text_config", model.config)  # flat, or nested in a whole model's
        return Converter(text.num_experts)

    class Converter:
        def __init__(self, experts):
            self.experts, self.halves = experts, {}

        def can_handle(self, name):
            return name.endswith((".w1", ".w2", ".w3"))

        def convert(self, name, tensor):
            import torch
            from veomni_transformers.plugin_models import ConvertedCheckpointTensor

            assert tensor.shape[0] == self.experts
            place, _, kind = name.rpartition(".")
            if kind == "w2":
                return ConvertedCheckpointTensor(place + ".down_proj", tensor.mT.contiguous())
            found = self.halves.setdefault(place, {})
            found[kind] = tensor
            if len(found) < 2:
                return None
            del self.halves[place]
            return [ConvertedCheckpointTensor(place + ".gate_up_proj", torch.cat([found["w1"], found["w3"]], dim=1))]

        def finalize(self):
            if self.halves:
                raise ValueError(f"{next(iter(self.halves))} has one half alone")
            return []
"""


@pytest.fixture(params=["qwen3_moe", "qwen3_vl_moe"])
def published(request, install, tmp_path):
    """A folder in the plugin's layout, ``p``, and the same weights as transformers saves them, ``a``."""
    install("acme-experts", PLUGIN)
    model = saved(request.param, tmp_path / "a")
    others = {name: tensor for name, tensor in tensors_in(tmp_path / "a").items() if ".mlp.experts." not in name}
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    packed = {}
    for name, value in model.named_parameters():
        place, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj" and "experts" in place:
            packed[f"{place}.w1"], packed[f"{place}.w3"] = (
                half.contiguous() for half in value.detach().chunk(2, dim=1)
            )
        elif leaf == "down_proj" and "experts" in place:
            packed[f"{place}.w2"] = value.detach().mT.contiguous()
    assert len(packed) == 6
    first = {
        name: tensor for name, tensor in packed.items() if name.endswith("w1")
    }  # the other half is in another file
    save_file(first, tmp_path / "p" / "model-00001-of-00002.safetensors")
    rest = {name: tensor for name, tensor in packed.items() if name not in first}
    save_file(others | rest, tmp_path / "p" / "model-00002-of-00002.safetensors")
    return tmp_path


@pytest.mark.parametrize("kept", [2**30, 1], ids=["kept", "converted again and again"])
def test_each_verb_reads_what_the_converter_gives(published, kept, monkeypatch, capsys):
    monkeypatch.setattr(converted_files, "_KEPT", kept)
    with monkeypatch.context() as patched:
        patched.setattr(converted_files.ConvertedFiles, "_whole", lambda *_: pytest.fail("it reads values"))
        inspect(str(published / "p"), json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["converter"] == "Converter" and not (found["missing"] or found["extra"] or found["misshapen"])
    assert {*found["experts"].values()} == {"fused"} and len(found["files"]) == 2
    inspect(str(published / "p"))
    assert "read by a plugin's Converter" in capsys.readouterr().out

    verify(str(published / "a"), str(published / "p"))
    assert "the same logits" in capsys.readouterr().out
    for layout in ("fused", "per_expert"):
        convert(str(published / "p"), published / layout, layout=layout, shard_size="5KB")
        verify(str(published / "a"), str(published / layout), forward=False)
    before, after = tensors_in(published / "a"), tensors_in(published / "per_expert")
    if before.keys() == after.keys():  # as transformers publishes Qwen3-MoE
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_the_converter_can_not_finish_or_gives_twice_is_refused(published):
    file = published / "p" / "model-00001-of-00002.safetensors"
    first = dict(sorted(tensors_in(published / "p").items()))
    halves = [name for name in first if name.endswith(".w1")]
    save_file({halves[0]: first[halves[0]]}, file)
    verbs = (
        lambda: inspect(str(published / "p")),
        lambda: convert(str(published / "p"), published / "b", layout="per_expert"),
        lambda: verify(str(published / "a"), str(published / "p")),
    )
    for verb in verbs:
        with pytest.raises(CheckpointError, match="can't be read by Converter: .*experts has one half alone"):
            verb()
    whole = {halves[0].replace("w1", "gate_up_proj"): torch.cat([first[halves[0]]] * 2, dim=1)}
    save_file({name: first[name] for name in halves} | whole, file)
    for verb in verbs:
        with pytest.raises(CheckpointError, match="gate_up_proj is there twice once it is converted"):
            verb()
    assert not (published / "b").exists()


def test_another_value_is_found(published, capsys):
    file = published / "p" / "model-00001-of-00002.safetensors"
    halves = {name: tensor for name, tensor in tensors_in(published / "p").items() if name.endswith(".w1")}
    next(iter(halves.values()))[1, 0, 0] += 1
    save_file(halves, file)
    with pytest.raises(typer.Exit):
        verify(str(published / "a"), str(published / "p"))
    assert "expert 1 of" in capsys.readouterr().out
