"""The patches that VeOmni's protocol names, in our words: generated, checked, and what --check says of changes.

The named version is the installed one; scripts/test_with_transformers.py runs this file with others.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer

from veomni_patchgen.cli import patchgen
from veomni_patchgen.patch_file import configs_in, load_patches
from veomni_patchgen.source import read_source

ROOT = Path(__file__).parents[1]
FOLDERS = {"examples": ROOT / "examples" / "patches", "tests": ROOT / "tests" / "veomni_patches"}
ALL = {path.stem: path for folder in FOLDERS.values() for path in sorted(folder.glob("*.py"))}
ALL["qwen3_moe"] = FOLDERS["examples"] / "qwen3_moe.py"
PROVEN = ("llama", "qwen3_vl_moe")  # with the examples of test_patched_models.py


@pytest.fixture(autouse=True)
def _siblings(monkeypatch):
    """Patches that import a sibling's find it, as where all are in one folder."""
    for folder in FOLDERS.values():
        monkeypatch.syspath_prepend(folder)
    yield
    for name in ALL:
        sys.modules.pop(name, None)


def config_of(name):
    return configs_in(load_patches(str(ALL[name])))["config"]


def checked(name, folder, capsys, *, passes=True, source=None):
    capsys.readouterr()
    options = {"output": folder, "check": True, "source": source}
    if passes:
        patchgen([str(ALL[name])], **options)
    else:
        with pytest.raises(typer.Exit):
            patchgen([str(ALL[name])], **options)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL)
def test_it_is_generated_with_a_marker_for_each_patch_and_checks_clean(name, tmp_path, capsys):
    patchgen([str(ALL[name])], output=tmp_path)
    config = config_of(name)
    text = (tmp_path / config.target_file).read_text()
    assert all(f"# patchgen: {patch.title}" in text for patch in config.all_patches())
    assert not re.search(r"^\s*from \.", text, re.MULTILINE)
    same = tmp_path / "same.py"  # of another file there is no proof, which test_patched_models.py has for the examples
    same.write_text(read_source(config.source_module).text)
    said = checked(name, tmp_path, capsys, source=None if name in PROVEN else same)
    assert "up to date" in said and ("gradients are upstream's" in said) == (name in PROVEN)


# Upstream's file is changed as a new version of transformers might: what is replaced, what takes its place, what the
# check must say, and a line of upstream's code that it must print.
PLANTED = [
    # a line moved
    ("llama", r"(\n +)variance = hidden", r"\1hidden_states = hidden_states.clone()\g<0>",
     "moved under override_method LlamaRMSNorm.forward", "+ hidden_states = hidden_states.clone()"),
    ("qwen3", r"class Qwen3MLP.*?super\(\).__init__\(\)\n", r"\g<0>        self.planted = 1\n",
     "moved under replace_class Qwen3MLP", "+ self.planted = 1"),
    ("qwen3_moe", r"def apply_rotary_pos_emb\(q, k, cos, sin", r"\g<0>, position_ids=None",
     "moved under replace_function apply_rotary_pos_emb", "position_ids=None"),
    ("qwen3_vl_npu", r"class Qwen3VLTextRMSNorm.*?variance = ", r"\g<0>1.0 * ",
     "moved under override_method Qwen3VLTextRMSNorm.forward", "+ variance = 1.0 * "),
    ("deepseek_v3", r"class DeepseekV3MoE.*?super\(\).__init__\(\)\n", r"\g<0>        self.planted = 1\n",
     "moved under modify_method DeepseekV3MoE.__init__", "+ self.planted = 1"),
    # a method or a function is gone
    ("qwen2_5_omni", r"def enable_talker\(", "def with_talker(",
     "override_method Qwen2_5OmniForConditionalGeneration.enable_talker: transformers.models.qwen2_5_omni."
     "modeling_qwen2_5_omni has no such method. Did you mean", "- def enable_talker(self):"),
    ("qwen3_vl", r"(class Qwen3VLModel\(.*?def )forward\(", r"\1run(",
     "modify_method Qwen3VLModel.forward: neither Qwen3VLModel nor an ancestor of it has forward", "- def forward("),
    ("qwen3_moe", r"\bapply_rotary_pos_emb\b", "apply_rotary",
     "has no function apply_rotary_pos_emb. Did you mean 'apply_rotary'", "-def apply_rotary_pos_emb(q, k, cos, sin"),
    # a class is renamed
    ("qwen3_moe", r"\bQwen3MoeExperts\b", "Qwen3MoeExpertGroup",
     "has no class Qwen3MoeExperts. Did you mean 'Qwen3MoeExpertGroup'", "-class Qwen3MoeExperts(nn.Module):"),
    ("qwen2_5_omni", r"\bSinusoidsPositionEmbedding\b", "AudioPositionEmbedding",
     "override_method Qwen2_5OmniPreTrainedModel._init_weights uses SinusoidsPositionEmbedding",
     "isinstance(module, AudioPositionEmbedding)"),
    # a field is lost
    ("llama", r"@auto_docstring\nclass LlamaForCausalLM", "@dataclass\nclass CausalLMOutputWithPast:\n"
     r"    logits: object\n    attentions: object\n\n\n\g<0>",
     "modify_method LlamaForCausalLM.forward: CausalLMOutputWithPast (upstream's line ",
     "has no field loss. Its fields: attentions, logits"),
    # one that is left out, and one that a sibling's function is renamed to
    ("qwen2_5_omni", r"\bQwen2_5OmniToken2WavModel\b", "Qwen2_5OmniVoiceModel",
     "exclude_from_output: transformers.models.qwen2_5_omni.modeling_qwen2_5_omni has no class or function "
     "Qwen2_5OmniToken2WavModel. Did you mean", "has changed since"),
    ("qwen3_5_moe", r"\bQwen3_5MoeRMSNormGated\b", "Qwen3_5MoeGatedNorm",
     "has no class Qwen3_5MoeRMSNormGated. Did you mean", "- variance = hidden_states.pow(2).mean(-1, keepdim=True)"),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "old", "new", "words", "line"), PLANTED)
def test_a_planted_change_is_named_with_its_patch_and_upstreams_lines(name, old, new, words, line, tmp_path, capsys):
    patchgen([str(ALL[name])], output=tmp_path)
    text = read_source(config_of(name).source_module).text
    newer = tmp_path / "newer.py"
    newer.write_text(re.sub(old, new, text, flags=re.DOTALL))
    assert newer.read_text() != text, "nothing was planted"
    said = checked(name, tmp_path, capsys, passes=False, source=newer)
    assert words in said and line in said, said
