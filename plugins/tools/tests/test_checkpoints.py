"""``veomni checkpoint inspect`` and ``verify``, and what all three verbs answer to folders that are wrong."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
import torch
import typer
from moe_checkpoints import rewrite, saved, tensors_in
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from veomni_core.errors import CheckpointError, ConfigError, VeOmniError
from veomni_tools.cli.checkpoint import convert, inspect, verify

EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"
GATE_UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.language_model.layers.0.mlp.experts.down_proj"


@pytest.fixture(autouse=True)
def _nothing_beside(monkeypatch):
    monkeypatch.setenv("VEOMNI_PLUGINS", "")


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A checkpoint of Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("once") / "a"
    saved("qwen3_moe", folder)
    return folder


@pytest.fixture
def folder(once, tmp_path):
    return shutil.copytree(once, tmp_path / "a")


def examined(folder, capsys, fails=False):
    capsys.readouterr()
    if fails:
        with pytest.raises(typer.Exit):
            inspect(str(folder), json=True)
    else:
        inspect(str(folder), json=True)
    return json.loads(capsys.readouterr().out)


def test_inspect_has_sizes_dtypes_and_the_layout_of_each_layer(folder, capsys):
    found = examined(folder, capsys)
    assert found["model"] == "Qwen3MoeForCausalLM" and found["files"] == ["model.safetensors"]
    assert found["bytes_by_dtype"] == {"BF16": 14816} and found["parameters"] == 7408
    assert found["experts"] == {f"model.layers.{layer}.mlp.experts": "per_expert" for layer in range(2)}
    assert found["layouts_that_from_pretrained_reads"] == ["per_expert", "fused"]
    assert not (found["missing"] or found["extra"] or found["misshapen"] or found["square"])
    inspect(str(folder))
    said = capsys.readouterr().out
    assert "experts: per_expert in 2 layers" in said and "keys: all that the model has, and nothing else" in said


def test_inspect_names_what_is_missing_extra_and_of_another_shape(folder, capsys):
    changes = {EXPERT: None, "model.norm.weight": None, "model.other": torch.ones(2)}
    rewrite(folder, **changes, **{"lm_head.weight": torch.ones(31, 16)})
    found = examined(folder, capsys, fails=True)
    assert found["missing"] == ["model.norm.weight", EXPERT]
    assert found["extra"] == ["model.other"]
    assert found["misshapen"] == ["lm_head.weight [31, 16] (the model: [32, 16])"]


def test_inspect_reads_no_values(folder, capsys, monkeypatch):
    from veomni_tools.checkpoints.weight_files import WeightFiles

    monkeypatch.setattr(WeightFiles, "rows", lambda *arguments: pytest.fail("it reads values"))
    examined(folder, capsys)


def test_tied_weights_are_not_missing_and_may_be_stored(tmp_path, capsys):
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "a")
    assert "lm_head.weight" not in tensors_in(tmp_path / "a")
    found = examined(tmp_path / "a", capsys)
    assert not (found["missing"] or found["extra"]) and found["experts"] == {}
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    rewrite(tmp_path / "b", **{"lm_head.weight": model.lm_head.weight.detach().clone()})
    assert not examined(tmp_path / "b", capsys)["extra"]
    verify(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "the same logits for 16 tokens" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        convert(str(tmp_path / "a"), tmp_path / "c", layout="fused")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({EXPERT: torch.ones(12, 16, dtype=torch.bfloat16)}, r"expert 1 of .*gate_up_proj differs by up to"),
        ({"model.norm.weight": torch.ones(16, dtype=torch.bfloat16)}, r"model.norm.weight differs by up to"),
        ({"model.norm.weight": torch.ones(16)}, r"model.norm.weight is BF16 \[16\] in the first, F32"),
        ({"model.norm.weight": None}, r"model.norm.weight is in the first alone"),
        ({"model.more": torch.ones(1)}, r"model.more is in the second alone"),
    ],
)
def test_verify_names_what_differs(once, folder, capsys, change, said):
    import re

    rewrite(folder, **change)
    with pytest.raises(typer.Exit):
        verify(str(once), str(folder))
    assert re.search(said, capsys.readouterr().out)


def test_verify_compares_bits(once, folder, capsys):
    weights = tensors_in(folder)["model.norm.weight"]
    zero = torch.zeros_like(weights)
    rewrite(folder, **{"model.norm.weight": zero})
    shutil.copytree(folder, folder.parent / "b")
    rewrite(folder.parent / "b", **{"model.norm.weight": -zero})
    with pytest.raises(typer.Exit):
        verify(str(folder), str(folder.parent / "b"))
    assert "differs by up to 0" in capsys.readouterr().out


def test_verify_loads_and_compares_what_was_loaded(once, folder, capsys, monkeypatch):
    """Another forward of equal weights, such as of another config, is seen by the logits alone."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(CheckpointError, match="compute other logits: .* apart"):
        verify(str(once), str(folder))


def no_config(folder):
    (folder / "config.json").unlink()


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def index_of_a_missing_file(folder):
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors_in(folder), "model-00009-of-00009.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_of_a_tensor_that_is_not_there(folder):
    index = {"metadata": {}, "weight_map": dict.fromkeys([*tensors_in(folder), "model.gone"], "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damaged_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')


def stored_twice(folder):
    shutil.copy(folder / "model.safetensors", folder / "copy.safetensors")


def tokenizer_only(folder):
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").write_text("{}")


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def an_adapter(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def of_a_training_run(folder):
    (folder / "model.safetensors").rename(folder / "shard-00001-model-00001-of-00001.safetensors")


def whole_and_one_by_one(folder):
    rewrite(folder, **{"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 24, 16, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (no_config, r"holds weights and no config.json"),
        (truncated, r"model.safetensors is damaged or truncated"),
        (index_of_a_missing_file, r"model-00009-of-00009.safetensors is missing"),
        (index_of_a_tensor_that_is_not_there, r"the index says that model.gone is in model.safetensors, and it isn't"),
        (damaged_index, r"is no index of weights"),
        (stored_twice, r"is in copy.safetensors and in model.safetensors"),
        (tokenizer_only, r"holds no weights: there is no \*.safetensors in it, only config.json"),
        (pickled, r"holds its weights as pytorch_model.bin, which is a pickle"),
        (an_adapter, r"holds an adapter .* veomni export --merge"),
        (of_a_training_run, r"holds the shards of a training run. Join them first: veomni export"),
        (whole_and_one_by_one, r"twice: whole, and"),
        (shutil.rmtree, r"is not there"),
    ],
)
def test_each_verb_refuses_a_folder_that_is_wrong(folder, wrong, said, tmp_path):
    wrong(folder)
    for verb in (
        lambda: inspect(str(folder)),
        lambda: convert(str(folder), tmp_path / "b", layout="fused"),
        lambda: verify(str(folder), str(folder)),
    ):
        with pytest.raises(VeOmniError, match=said):
            verb()
    assert not (tmp_path / "b").exists() and not (tmp_path / ".b.partial").exists()


def by_bitsandbytes(folder):
    rewrite(folder, **{f"{EXPERT}.absmax": torch.ones(2)})


def by_fp8(folder):
    rewrite(folder, **{EXPERT: torch.ones(12, 16).to(torch.float8_e4m3fn)})


def by_the_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))


@pytest.mark.parametrize(
    ("wrong", "method"), [(by_bitsandbytes, "bitsandbytes"), (by_fp8, "fp8"), (by_the_config, "mxfp4")]
)
def test_quantized_weights_are_refused_by_name(folder, wrong, method, tmp_path, capsys):
    wrong(folder)
    with pytest.raises(ConfigError, match=f"weights quantized by {method}: their scales belong to the layout"):
        convert(str(folder), tmp_path / "b", layout="fused")
    with pytest.raises(ConfigError, match=f"quantized by {method}"):
        verify(str(folder), str(folder))
    with contextlib.suppress(typer.Exit):
        inspect(str(folder), json=True)
    assert json.loads(capsys.readouterr().out)["quantization"] == method


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": "fuzed"}, r"--layout: there is no layout 'fuzed'. Did you mean 'fused'?"),
        ({"layout": "fused", "square": "wide"}, r"--square: there is no layout 'wide'"),
        ({"layout": "fused", "shard_size": "5 apples"}, r"--shard-size: '5 apples' is no size; write 5GB"),
        ({"layout": "fused", "shard_size": "-1GB"}, r"--shard-size: '-1GB' is no size"),
    ],
)
def test_wrong_options_are_refused(folder, options, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        convert(str(folder), tmp_path / "b", **options)


def test_a_target_that_exists_is_never_written(folder, tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="b exists; name a folder that doesn't"):
        convert(str(folder), tmp_path / "b", layout="fused")
    with pytest.raises(ConfigError, match="a is what would be read; name a folder"):
        convert(str(folder), folder, layout="fused")
    assert not [*(tmp_path / "b").iterdir()]


def test_files_beside_the_weights_are_copied_and_the_old_index_is_not(folder, tmp_path):
    for name in ("tokenizer.json", "chat_template.jinja", "README.md", "notes.bak"):
        (folder / name).write_text("beside")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors_in(folder), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(str(folder), tmp_path / "b", layout="fused")
    there = {path.name for path in (tmp_path / "b").iterdir()}
    assert there == {
        *("README.md", "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"),
        *("model-00001-of-00001.safetensors", "model.safetensors.index.json"),
    }
    written = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert written["weight_map"].keys() == tensors_in(tmp_path / "b").keys()
    assert written["metadata"]["total_size"] == 14816


def test_experts_that_are_missing_or_of_other_sizes_are_not_converted(folder, tmp_path):
    rewrite(folder, **{EXPERT: None})
    with pytest.raises(CheckpointError, match=f"experts are missing: {EXPERT}. Copy"):
        convert(str(folder), tmp_path / "b", layout="fused")
    rewrite(folder, **{EXPERT: torch.ones(13, 16)})
    with pytest.raises(CheckpointError, match=r"experts have other shapes than the model's: .*\[13, 16\]"):
        convert(str(folder), tmp_path / "b", layout="fused")
    rewrite(folder, **{EXPERT: torch.ones(12, 16)})
    with pytest.raises(CheckpointError, match=r"several dtypes \(BF16, F32\), which one tensor can't hold"):
        convert(str(folder), tmp_path / "b", layout="fused")


@pytest.mark.parametrize("number", ["9", "01", "-1", "9" * 100])
def test_experts_that_the_model_does_not_have_are_extra_and_not_converted(number, folder, tmp_path, capsys):
    more = EXPERT.replace("experts.1.", f"experts.{number}.")
    rewrite(folder, **{more: torch.ones(12, 16, dtype=torch.bfloat16)})
    assert examined(folder, capsys)["extra"] == [more]
    with pytest.raises(CheckpointError, match=f"the model has no such experts: {more}. Use the config of these"):
        convert(str(folder), tmp_path / "b", layout="fused")


def test_what_is_copied_in_another_shape_is_said(folder, tmp_path, capsys):
    rewrite(folder, **{"model.norm.weight": torch.tensor(1.0)})
    convert(str(folder), tmp_path / "b", layout="fused")
    assert "0 keys missing, 0 extra, 1 of other shapes" in capsys.readouterr().out


def test_a_square_that_nothing_decides_is_refused_until_it_is_said(tmp_path, capsys):
    saved("qwen3_vl_moe", tmp_path / "a", 8)  # 2I = H
    tensors = tensors_in(tmp_path / "a")
    turned = {name: tensors[name].mT.contiguous() for name in (GATE_UP, DOWN)}
    rewrite(tmp_path / "a", **turned)  # one layer, both projections: down says it
    found = examined(tmp_path / "a", capsys)
    assert found["experts"][GATE_UP.rpartition(".")[0]] == "fused_transposed"
    assert [*found["experts"].values()].count("fused") == 1 and len(found["square"]) == 2

    split = {f"{DOWN.rpartition('.')[0]}.{e}.down_proj.weight": tensors[DOWN][e] for e in range(4)}
    rewrite(tmp_path / "a", **{DOWN: None}, **split)  # down no longer says how gate_up is stored
    assert examined(tmp_path / "a", capsys, fails=True)["experts"][GATE_UP.rpartition(".")[0]] is None
    with pytest.raises(CheckpointError, match=r"gate_up_proj is square, and nothing beside it .* --square fused"):
        convert(str(tmp_path / "a"), tmp_path / "b", layout="fused")
    convert(str(tmp_path / "a"), tmp_path / "b", layout="fused", square="fused_transposed")
    again = tensors_in(tmp_path / "b")
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_weights_without_a_config_take_one(folder, tmp_path, capsys):
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    (folder / "config.json").unlink()
    convert(str(folder), tmp_path / "b", layout="fused", config=tmp_path / "config.json")
    assert (tmp_path / "b" / "config.json").is_file()
    verify(str(folder), str(tmp_path / "b"), config=tmp_path / "config.json", forward=False)


def test_integers_and_single_values_are_copied_as_they_are(folder, tmp_path):
    odd = {
        "model.count": torch.tensor(7),
        "model.flags": torch.tensor([True, False, True]),
        "model.none": torch.ones(0),
    }
    rewrite(folder, **odd)
    convert(str(folder), tmp_path / "b", layout="fused", shard_size="100KB")
    there = tensors_in(tmp_path / "b")
    assert all(torch.equal(tensor, there[name]) and tensor.dtype == there[name].dtype for name, tensor in odd.items())
    save_file(there, tmp_path / "aligned.safetensors")
