"""The built-in ops and the rules that find them, described without torch."""

from __future__ import annotations

from veomni_core.spec import OpSpec, SiteRule

BUILTIN_OPS: tuple[OpSpec, ...] = (
    OpSpec(
        name="attention",
        variants=("standard",),
        config_field="attn_implementation",
        default="flash_attention_2",
        contract="veomni_core.ops.attention:CONTRACTS",
        description="softmax attention behind transformers' AttentionInterface",
        published={
            "sdpa": "veomni-torch",
            "flash_attention_2": "veomni-flash-attn",
            "flash_attention_3": "veomni-flash-attn",
            "flash_attention_4": "veomni-flash-attn",
            "flex_attention": "veomni-flash-attn",
            "npu_fusion_attention": "veomni-npu",
            "native-sparse": "",
        },
    ),
    OpSpec(
        name="rms_norm",
        variants=("standard", "cast_after", "offset", "unweighted", "unweighted_rounded_scale"),
        config_field="rms_norm_implementation",
        default="liger_kernel",
        contract="veomni_core.ops.rms_norm:CONTRACTS",
        description="root-mean-square normalisation over the last dimension",
        variant_aliases={"qwen3_5": "offset"},
        published={
            "torch": "veomni-torch",
            "liger_kernel": "veomni-liger",
            "triton": "veomni-triton-moe",
            "quack": "veomni-quack",
            "npu": "veomni-npu",
        },
    ),
    OpSpec(
        name="rms_norm_gated",
        variants=("standard", "sigmoid", "gate_first"),
        config_field="rms_norm_gated_implementation",
        default="eager",
        contract="veomni_core.ops.rms_norm_gated:CONTRACTS",
        description="root-mean-square normalisation with a gate",
    ),
    OpSpec(
        name="rotary_pos_emb",
        variants=("full", "partial", "interleaved", "interleaved_partial", "pairwise", "deinterleaved", "half_width"),
        config_field="rotary_pos_emb_implementation",
        default="liger_kernel",
        contract="veomni_core.ops.rotary_pos_emb:CONTRACTS",
        description="rotary position embedding of queries and keys",
        published={
            "liger_kernel": "veomni-liger",
            "triton": "veomni-triton-moe",
            "quack": "veomni-quack",
            "npu": "veomni-npu",
        },
    ),
    OpSpec(
        name="swiglu_mlp",
        variants=("standard", "gelu_tanh", "gelu"),
        config_field="swiglu_mlp_implementation",
        default="liger_kernel",
        contract="veomni_core.ops.swiglu_mlp:CONTRACTS",
        description="the gated activation between an MLP's linears",
        published={"torch": "veomni-torch", "liger_kernel": "veomni-liger", "npu": "veomni-npu"},
    ),
    OpSpec(
        name="cross_entropy_loss",
        variants=("causal", "seq_cls"),
        config_field="cross_entropy_loss_implementation",
        default="liger_kernel",
        contract="veomni_core.ops.cross_entropy_loss:CONTRACTS",
        description="the output projection and its cross entropy, fused for causal models",
        published={
            "chunk_loss": "veomni-torch",
            "liger_kernel": "veomni-liger",
            "quack": "veomni-quack",
            "npu": "veomni-npu",
        },
    ),
    OpSpec(
        name="moe_experts",
        variants=("standard", "clamped"),
        config_field="moe_implementation",
        default="fused_triton",
        contract="veomni_core.ops.moe_experts:CONTRACTS",
        description="the experts of a mixture-of-experts layer, after routing",
        variant_aliases={"gpt_oss": "clamped"},
        published={
            "grouped_mm": "veomni-torch",
            "fused_triton": "veomni-triton-moe",
            "fused_liger": "veomni-liger",
            "fused_quack": "veomni-quack",
            "fused_npu": "veomni-npu",
        },
        legacy_values={"fused": "fused_triton"},
    ),
    OpSpec(
        name="load_balancing_loss",
        variants=("standard",),
        config_field="load_balancing_loss_implementation",
        default="triton",
        contract="veomni_core.ops.load_balancing_loss:CONTRACTS",
        description="the auxiliary loss that keeps experts evenly used",
        published={"torch": "veomni-torch", "triton": "veomni-triton-moe"},
    ),
)

# Rules that clone a function come before those that wrap it, so that a clone never has to look through a wrapper.
BUILTIN_SITE_RULES: tuple[SiteRule, ...] = (
    SiteRule("norm modules", "veomni_core.sites.norms:NormModules", order=10),
    SiteRule("gated norm modules", "veomni_core.sites.gated_norms:GatedNormModules", order=10),
    SiteRule("gated MLP modules", "veomni_core.sites.gated_mlps:GatedMlpModules", order=10),
    SiteRule("experts modules", "veomni_core.sites.experts:ExpertsModules", order=10),
    SiteRule("rotary functions", "veomni_core.sites.rotary:RotaryFunctions", order=20),
    SiteRule("load-balancing functions", "veomni_core.sites.load_balancing:LoadBalancingFunctions", order=20),
    SiteRule("attention interface", "veomni_core.sites.attention:AttentionInterface", order=30, installs_eager=True),
    SiteRule("causal losses", "veomni_core.sites.causal_loss:CausalLosses", order=40),
    SiteRule("classification losses", "veomni_core.sites.classification_loss:ClassificationLosses", order=40),
    SiteRule("op slots", "veomni_core.sites.slots:DeclaredSlots", order=10),
)
