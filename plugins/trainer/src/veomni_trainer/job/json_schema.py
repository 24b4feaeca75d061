"""The JSON schema of a job, for editors: keys, values, defaults and descriptions, and the kernels installed here."""

from __future__ import annotations

from typing import Any

from veomni_core import Registry, discover
from veomni_core.commands import AUTO, EAGER, ON_CHANGE, REQUIREMENTS, TRAINING_LOGITS, known_presets
from veomni_trainer.job.schema import Job
from veomni_transformers.jobs.job_model import ALIASES, DTYPES


def job_schema(registry: Registry | None = None) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a job's YAML.

    Under ``model.ops_implementation`` it has the fields of the installed ops, each with the values that exist here.
    """
    registry = registry or discover()
    schema = Job.model_json_schema()
    definitions = schema["$defs"]
    model = definitions["ModelSection"]
    model["additionalProperties"] = False
    model["properties"]["dtype"]["enum"] = [*DTYPES]
    model["properties"]["ops_implementation"] |= _ops_implementation(registry)
    model["properties"] |= {alias: model["properties"][name] for alias, name in ALIASES.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A job of `veomni train`"}


def _ops_implementation(registry: Registry) -> dict[str, Any]:
    kernel = {"type": "object", "required": ["kernel"], "properties": {"kernel": {"type": "string"}}}
    fields: dict[str, Any] = {
        "preset": {
            "description": "What fills the fields that aren't written.",
            "enum": sorted(known_presets(registry)),
        },
        "profile": {"description": "Measured milliseconds, by op and kernel.", "type": "object"},
        "on_change": {"description": "What follows when a bound module's settings change.", "enum": [*ON_CHANGE]},
        "training_logits": {"description": "The logits of a step with a fused loss.", "enum": [*TRAINING_LOGITS]},
        "require": {
            "description": "What every kernel must be.",
            "anyOf": [{"enum": [*REQUIREMENTS]}, {"type": "array", "items": {"enum": [*REQUIREMENTS]}}],
        },
        "allow_unused": {"description": "The fields whose op the model may lack.", "type": ["boolean", "array"]},
    }
    for op in sorted(registry.ops.values(), key=lambda op: op.config_field):
        name = {"enum": sorted({AUTO, EAGER, *registry.known_values(op.name)})}
        in_order = {"type": "array", "items": {"anyOf": [name, kernel]}}
        by_module = {"type": "object", "additionalProperties": {"anyOf": [name, kernel, in_order]}}
        fields[op.config_field] = {"description": op.description, "anyOf": [name, kernel, in_order, by_module]}
    return {
        "anyOf": [{"type": "object", "properties": fields, "additionalProperties": False}, {"type": "null"}],
    }
