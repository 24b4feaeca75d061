"""Qwen2.5-Omni that trains its thinker: all that speaks is left out, and what still called it says so."""

from transformers import initialization as init
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniThinkerForConditionalGeneration,
    SinusoidsPositionEmbedding,
)

from veomni_patchgen import PatchConfig
from veomni_patchgen.source import read_source

config = PatchConfig("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni", "patched_modeling_qwen2_5_omni_gpu.py")
SPEAKS = ("Qwen2_5OmniTalker", "Qwen2_5OmniToken2Wav", "AMPBlock", "Activation1d", "SnakeBeta", "UpSample1d", "DownS")
# The DiT's layers and others are left out with them: nothing else uses them.
upstream = read_source(config.source_module)
config.exclude_from_output(*(n for n in upstream.statements if n.startswith(SPEAKS) and n not in upstream.imports))


@config.override_method("Qwen2_5OmniPreTrainedModel._init_weights", description="no filters of the vocoder")
def init_weights(self, module):
    super()._init_weights(module)
    if isinstance(module, SinusoidsPositionEmbedding):
        made = SinusoidsPositionEmbedding(module.length, module.channels, module.max_timescale)
        init.copy_(module.positional_embedding, made.positional_embedding)


@config.override_method("Qwen2_5OmniForConditionalGeneration.__init__", description="the thinker alone")
def model_init(self, config):
    super().__init__(config)
    self.thinker = Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)
    self.has_talker = False
    self.speaker_map = {}
    self.post_init()


@config.override_method("Qwen2_5OmniForConditionalGeneration.enable_talker", description="nothing speaks here")
def enable_talker(self):
    raise NotImplementedError("The talker is left out of training. Use upstream transformers for speech.")


# Upstream's has a list as default: `talker_eos_token_id: list[int] = [8292, 8294]`.
@config.override_method("Qwen2_5OmniForConditionalGeneration.generate", description="nothing speaks here")
def generate(self, *args, **kwargs):
    raise NotImplementedError("Generation is left out of training. Use upstream transformers for speech.")


@config.override_method("Qwen2_5OmniForConditionalGeneration.forward", new=True, description="to the thinker")
def forward(self, *args, **kwargs):
    return self.thinker(*args, **kwargs)
