"""Describes the model to veomni-core. Imports neither torch nor transformers."""

from __future__ import annotations

from veomni_core import ModelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 2


@hookimpl
def veomni_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            "acme_parallel",
            config="acme_model.modeling:AcmeParallelConfig",
            model="acme_model.modeling:AcmeParallelForCausalLM",
            parallel_plan="acme_model.modeling:PARALLEL_PLAN",
            converter="acme_model.converter:create_acme_checkpoint_tensor_converter",
        )
    ]
