"""Writes the YAML of a new job from a few answers."""

from __future__ import annotations

import yaml

from veomni_core.commands import at_home
from veomni_core.errors import ConfigError, did_you_mean
from veomni_transformers.jobs.hub_snapshots import is_hub_id

# Sizes of a model that learns something in minutes on one machine; a model type takes those keys that its config has.
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


def new_job(name: str, model: str, data: str, output_dir: str, steps: int, sequence_length: int, preset: str) -> str:
    """A job as YAML with comments. The arguments are what differs from job to job; everything else gets its default.

    Args:
        name: the file's.
        model: a folder or Hub id with weights, a folder or file with a config, or a model type such as ``qwen3_moe``.
        data: a file, a folder, a glob, a Hub id, or ``python-stdlib``.

    Raises:
        ConfigError: ``model`` is none of what it can be.
    """
    return f"""\
# veomni train {name} --dry-run    what it would do, and the memory that it needs
# veomni train {name}
model:
{_model_lines(model)}
  ops_implementation:
    preset: {preset}    # which kernels: `veomni plan {name}` says which one runs where

data:
{_line("files", data)}
{_line("sequence_length", sequence_length)}

train:
{_line("output_dir", output_dir)}
{_line("steps", steps)}
"""


def _model_lines(model: str) -> str:
    path = at_home(model)
    if is_hub_id(model) or (path.is_dir() and any(path.glob("*.safetensors"))):
        return _line("weights", model)
    if path.exists() or "/" in model:
        return _line("config", model)
    return "\n".join(["  config:", f"    model_type: {model}", *(f"    {k}: {v}" for k, v in _sizes(model).items())])


def _sizes(model_type: str) -> dict[str, int]:
    """The sizes of a small model of this type."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"--model {model_type}: there is no such file or folder, and transformers has no such model type. "
            f"{did_you_mean(model_type, list(CONFIG_MAPPING))}"
        )
    known = CONFIG_MAPPING[model_type]().to_dict()
    return {key: value for key, value in SMALL.items() if known.get(key) is not None}


def _line(key: str, value: str | int) -> str:
    return "  " + yaml.safe_dump({key: value}, width=1000).strip()
