"""``build_foundation_model`` on the CPU in float32, all eager unless a test says otherwise."""

from __future__ import annotations

from veomni_core import build_foundation_model

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
EAGER = {"preset": "eager"}


def build_on_cpu(source, weights=None, *, ops=EAGER, **options):
    options = {"init_device": "cpu", "torch_dtype": "float32", **options}
    return build_foundation_model(source, weights, ops_implementation=ops, **options)
