"""A norm that leaves its eps out, for a patch that changes what a model computes."""

from veomni_patchgen import PatchConfig

config = PatchConfig("transformers.models.qwen3_moe.modeling_qwen3_moe", "wrong_norm_generated.py")


def forward(self, hidden_states):
    return self.weight * hidden_states / hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
