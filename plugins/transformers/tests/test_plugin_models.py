"""A plugin's model and a plugin's converter: what is built, read and refused; nothing of transformers is changed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, Qwen2VLConfig

from built_on_cpu import build_on_cpu
from veomni_core.errors import CheckpointError, ConfigError, SpecError, UnknownNameError
from veomni_transformers import plugin_models
from veomni_transformers.build import load_as_trained
from veomni_transformers.jobs.model_config import load_model_config
from veomni_transformers.plugin_models import converter_for, processor_in, tokenizer_in

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
ACME = """
    from veomni_core import ModelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 2

    @hookimpl
    def veomni_models():
        return [ModelSpec("acme", config="{module}:AcmeConfig", model="{module}:AcmeForCausalLM",
                          converter="{module}:make", tokenizer="{module}:Words", processor="{module}:Words",
                          parallel_plan="{module}:PLAN")]

    PLAN = {"ep": {"layers.*.mlp": "ep_router"}}

    def __getattr__(name):  # a description imports no transformers
        from transformers import LlamaConfig, LlamaForCausalLM
        from veomni_transformers.plugin_models import ConvertedCheckpointTensor

        class AcmeConfig(LlamaConfig):
            model_type = "acme"

        class AcmeForCausalLM(LlamaForCausalLM):
            config_class = AcmeConfig

        class Words:
            @classmethod
            def from_pretrained(cls, folder, **options):
                return cls()

        class Converter:
            def __init__(self):
                self.halves = {}

            def can_handle(self, name):
                return name.endswith((".upper", ".lower"))

            def convert(self, name, tensor):
                place, _, half = name.rpartition(".")
                found = self.halves.setdefault(place, {})
                found[half] = tensor
                if len(found) < 2:
                    return None
                import torch
                del self.halves[place]
                return ConvertedCheckpointTensor(place + ".weight", torch.cat([found["upper"], found["lower"]]))

            def finalize(self):
                if self.halves:
                    raise RuntimeError(f"halves are left: {[*self.halves]}")
                return []

        made = {"AcmeConfig": AcmeConfig, "AcmeForCausalLM": AcmeForCausalLM, "Words": Words,
                "make": lambda model: Converter()}
        if name not in made:
            raise AttributeError(name)
        globals().update(made)
        return made[name]
"""


@pytest.fixture
def acme(install):
    return install("acme-models", ACME)


def in_halves(folder):
    """Store the down projections in two halves, as the converter reads them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("down_proj.weight")]:
        whole = tensors.pop(name)
        place = name.removesuffix(".weight")
        tensors |= {f"{place}.upper": whole[:6].clone(), f"{place}.lower": whole[6:].clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_it_is_built_saved_and_read_from_its_own_and_from_the_published_layout(acme, tmp_path):
    known, config = len(CONFIG_MAPPING), {"model_type": "acme", **SHAPE}
    model = build_on_cpu(config, torch_dtype="float32")
    assert type(model).__name__ == "AcmeForCausalLM" or type(model).__mro__[1].__name__ == "AcmeForCausalLM"
    assert model.config.base_model_ep_plan == {"layers.*.mlp": "ep_router"}
    model.save_pretrained(tmp_path)
    for stored in ("its own", "published"):
        if stored == "published":
            in_halves(tmp_path)
        built = build_on_cpu(tmp_path, tmp_path, torch_dtype="float32")
        loaded = load_as_trained(tmp_path)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, built.get_parameter(name)), (stored, name)
            assert torch.equal(parameter, loaded.get_parameter(name)), (stored, name)
    assert len(CONFIG_MAPPING) == known and "acme" not in CONFIG_MAPPING


def test_a_checkpoint_that_its_converter_can_not_finish_is_refused(acme, tmp_path):
    build_on_cpu({"model_type": "acme", **SHAPE}).save_pretrained(tmp_path)
    tensors = in_halves(tmp_path)
    del tensors["model.layers.1.mlp.down_proj.lower"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"can't be read by Converter: halves are left: \['model.layers.1"):
        build_on_cpu(tmp_path, tmp_path)
    both = {**tensors, "model.layers.1.mlp.down_proj.lower": torch.ones(10, 24)}
    save_file({**both, "model.layers.0.mlp.down_proj.weight": torch.ones(16, 24)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.down_proj.weight is there twice once it is converted"):
        load_as_trained(tmp_path)
    with pytest.raises(CheckpointError, match="which needs whole tensors"):
        from transformers import BitsAndBytesConfig

        build_on_cpu(tmp_path, tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))


def test_tokenizer_and_processor_are_of_the_plugins_classes(acme, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "acme", **SHAPE}))
    assert type(tokenizer_in(tmp_path)).__name__ == type(processor_in(tmp_path)).__name__ == "Words"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    monkeypatch.setattr(plugin_models.AutoTokenizer, "from_pretrained", lambda folder, **options: "transformers' own")
    assert tokenizer_in(tmp_path) == "transformers' own"


def test_a_type_that_transformers_has_takes_a_converter_and_no_classes(install, tmp_path):
    source = ACME.replace('"acme"', '"llama"')
    install("acme-takes-llama", source)
    with pytest.raises(ConfigError, match=r"model_type llama is transformers' own, and a plugin brings .*:AcmeForCaus"):
        load_as_trained(saved_llama(tmp_path))


def saved_llama(folder):
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


def test_a_converter_alone_reads_a_type_that_transformers_has(install, tmp_path):
    start = ACME.index("return [")
    end = ACME.index("PLAN =")
    install(
        "acme-converts", f'{ACME[:start]}return [ModelSpec("llama", converter="{{module}}:make")]\n\n    {ACME[end:]}'
    )
    model = load_as_trained(saved_llama(tmp_path))
    in_halves(tmp_path)
    again = load_as_trained(tmp_path)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


def test_a_class_may_have_its_converter_as_veomnis_generated_classes_do(tmp_path):
    class Own(LlamaForCausalLM):
        @staticmethod
        def _create_checkpoint_tensor_converter(model):
            text = getattr(model.config, "text_config", model.config)  # flat, or nested in a whole model's
            return Counting(text.hidden_size)

    class Counting:
        def __init__(self, width):
            self.width = width

        can_handle = convert = finalize = lambda self, *arguments: None

    with torch.device("meta"):
        flat = Own(LlamaConfig(**SHAPE))
        assert converter_for(flat).width == 16
        flat.config = Qwen2VLConfig(text_config={**SHAPE, "hidden_size": 48})
        assert converter_for(flat).width == 48


def test_a_parallel_plan_may_be_written_as_veomnis_is(install):
    written = """
    def PLAN():
        from torch.distributed.tensor import Shard
        from veomni_core import ParallelPlan
        return ParallelPlan(extra_parallel_plan={"ep": {"model.layers.*.mlp.experts.gate_up_proj": Shard(0)}})
"""
    install("acme-plans", ACME.replace('\n    PLAN = {"ep": {"layers.*.mlp": "ep_router"}}\n', written))
    experts = {"layers.*.mlp.experts.gate_up_proj": "grouped_gemm", "layers.*.mlp.experts": "ep_dispatch_experts"}
    model = build_on_cpu({"model_type": "acme", **SHAPE}, torch_dtype="float32")
    assert model.config.base_model_ep_plan == experts


def test_what_is_wrong_with_a_plugins_model_is_said(install, tmp_path):
    gone = ACME.replace("{module}:AcmeConfig", "acme_gone.config:Config")
    install("acme-gone", gone)
    with pytest.raises(SpecError, match="ModelSpec 'acme': config acme_gone.config:Config can't be loaded: ModuleNot"):
        load_model_config({"model_type": "acme"})


def test_a_type_that_nobody_has_names_the_nearest_and_plugins_that_failed(acme, install):
    install("acme-broken", "import a_library_that_is_not_here")
    with pytest.raises(
        UnknownNameError, match=r"'acmee' is unknown. Did you mean 'acme'\?.*acme-broken failed to load"
    ):
        load_model_config({"model_type": "acmee"})


def test_two_plugins_with_one_model_type_both_fail(acme, install):
    install("acme-again", ACME)
    with pytest.raises(UnknownNameError, match="model type 'acme' is defined by acme-again 1.0 and acme-models 1.0"):
        load_model_config({"model_type": "acme"})


def test_a_converter_without_a_method_is_refused(tmp_path):
    class Own(LlamaForCausalLM):
        _create_checkpoint_tensor_converter = staticmethod(lambda model: object())

    with torch.device("meta"), pytest.raises(SpecError, match=r"has no can_handle\(\)"):
        converter_for(Own(LlamaConfig(**SHAPE)))
