"""Declares to veomni-core how ops are found in transformers' models. Imports neither torch nor transformers."""

from __future__ import annotations

from veomni_core import CommandSpec, ModelRule, ModelViewSpec, SiteRule, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

# Rules that clone a function have a lower order than rules that wrap it, so that none has to clone a wrapper.
SITE_RULES: tuple[SiteRule, ...] = (
    SiteRule("op slots", "veomni_transformers.slots:DeclaredSlots", order=10, proves=True),
    SiteRule("norm modules", "veomni_transformers.norms.rms_norm:NormModules", order=10, proves=True),
    SiteRule("gated norm modules", "veomni_transformers.norms.rms_norm_gated:GatedNormModules", order=10, proves=True),
    SiteRule("linear modules", "veomni_transformers.linears.locator:LinearModules", order=10, proves=True),
    SiteRule("gated MLP modules", "veomni_transformers.gated_mlps.locator:GatedMlpModules", order=10, proves=True),
    SiteRule(
        "experts modules",
        "veomni_transformers.experts.locator:ExpertsModules",
        order=10,
        proves=True,
        installs_eager=True,
    ),
    SiteRule(
        "expert-parallel experts",
        "veomni_transformers.experts.token_dispatch:ExpertParallelModules",
        order=10,
        proves=True,
    ),
    SiteRule("rotary functions", "veomni_transformers.rotary.locator:RotaryFunctions", order=20, proves=True),
    SiteRule(
        "load-balancing functions",
        "veomni_transformers.losses.load_balancing:LoadBalancingFunctions",
        order=20,
        proves=True,
    ),
    SiteRule(
        "causal convolution functions",
        "veomni_transformers.convolutions.locator:CausalConvolutions",
        order=20,
        proves=True,
    ),
    SiteRule("gated delta rules", "veomni_transformers.delta_rules.locator:GatedDeltaRules", order=20, proves=True),
    SiteRule(
        "Kimi delta attention", "veomni_transformers.delta_rules.locator:KimiDeltaAttention", order=20, proves=True
    ),
    SiteRule("Mamba 2 scans", "veomni_transformers.mamba2_scans.locator:Mamba2Scans", order=20, proves=True),
    SiteRule("Mamba 1 scans", "veomni_transformers.mamba2_scans.locator:SelectiveScans", order=20, proves=True),
    SiteRule(
        "sparse attention's indexers", "veomni_transformers.sparse_attention.locator:Indexers", order=25, proves=True
    ),
    SiteRule(
        "indexers of compressed keys",
        "veomni_transformers.sparse_attention.compressed:CompressedIndexers",
        order=25,
        proves=True,
    ),
    SiteRule("sparse attention", "veomni_transformers.sparse_attention.locator:SparseAttention", order=25, proves=True),
    SiteRule(
        "native sparse attention",
        "veomni_transformers.native_sparse.locator:NativeSparseAttention",
        order=25,
        proves=True,
    ),
    SiteRule(
        "attention interface",
        "veomni_transformers.attention.locator:AttentionInterface",
        order=30,
        installs_eager=True,
        reads_parameters=False,
        proves=True,
    ),
    SiteRule("causal losses", "veomni_transformers.losses.causal:CausalLosses", order=40, proves=True),
    SiteRule(
        "token log-probabilities", "veomni_transformers.losses.token_logprobs:TokenLogprobs", order=40, proves=True
    ),
    SiteRule(
        "classification losses", "veomni_transformers.losses.classification:ClassificationLosses", order=40, proves=True
    ),
)


@hookimpl
def veomni_sites() -> tuple[SiteRule, ...]:
    return SITE_RULES


@hookimpl
def veomni_model_rules() -> list[ModelRule]:
    return [
        ModelRule("no hub kernels", "veomni_transformers.hub_kernels:NoHubKernels", order=-10),
        ModelRule("placement notes", "veomni_transformers.placement_notes:PlacementNotes", order=-5),
        ModelRule("packed steps", "veomni_transformers.packed.packed_steps:PackedSteps"),
        ModelRule("steps of sparse attention", "veomni_transformers.sparse_attention.steps:SparseSteps", order=60),
        ModelRule("three rows of positions", "veomni_transformers.packed.three_rows:ThreeRows", order=60),
        ModelRule("whole vectors", "veomni_transformers.whole_vectors:WholeVectors", order=70),
        ModelRule("every tower", "veomni_transformers.towers.every_tower:EveryTowerRule", order=60),
    ]


@hookimpl
def veomni_model_views() -> list[ModelViewSpec]:
    return [ModelViewSpec("transformers", "veomni_transformers.model_view:TransformersView")]


@hookimpl
def veomni_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            "source", "veomni_transformers.cli.source:source", "The code that runs at a module of a bound model."
        ),
        CommandSpec(
            "parity", "veomni_transformers.cli.parity:parity", "Whether training and rollouts give the same bits."
        ),
        CommandSpec(
            "coverage", "veomni_transformers.cli.coverage:coverage", "What binds in every model type of transformers."
        ),
    ]
