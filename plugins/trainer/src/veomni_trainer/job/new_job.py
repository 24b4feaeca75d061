"""Writes the YAML of a new job from a few answers."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from veomni_core.commands import at_home
from veomni_core.errors import ConfigError

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


@dataclass(frozen=True)
class NewJob:
    """The answers: what differs from job to job. Everything else gets its default.

    Attributes:
        model: a folder with weights, a folder or file with a config, a Hub id, or a model type such as ``qwen3_moe``.
        data: a file, a folder, a glob, or ``python-stdlib``.
    """

    model: str
    data: str
    output_dir: str
    steps: int
    sequence_length: int
    preset: str = "auto"

    def to_yaml(self, name: str) -> str:
        """The job as YAML with comments; ``name`` is the file's.

        Raises:
            ConfigError: ``model`` is none of what it can be.
        """
        return "\n".join(
            [
                f"# veomni train {name} --dry-run    what it would do, and the memory that it needs",
                f"# veomni train {name}",
                "model:",
                *self._model(),
                "  ops_implementation:",
                f"    preset: {self.preset}    # which kernels: `veomni plan {name}` says which one runs where",
                "",
                "data:",
                _line("files", self.data),
                _line("sequence_length", self.sequence_length),
                "",
                "train:",
                _line("output_dir", self.output_dir),
                _line("steps", self.steps),
                "",
            ]
        )

    def _model(self) -> list[str]:
        path = at_home(self.model)
        if path.is_dir() and any(path.glob("*.safetensors")):
            return [_line("weights", self.model)]
        if path.exists() or "/" in self.model:
            return [_line("config", self.model)]
        return ["  config:", f"    model_type: {self.model}", *(f"    {k}: {v}" for k, v in _sizes(self.model).items())]


def _sizes(model_type: str) -> dict[str, int]:
    """The sizes of a small model of this type."""
    from transformers import CONFIG_MAPPING

    from veomni_core.errors import did_you_mean

    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"--model {model_type}: there is no such file or folder, and transformers has no such model type. "
            f"{did_you_mean(model_type, list(CONFIG_MAPPING))}"
        )
    known = CONFIG_MAPPING[model_type]().to_dict()
    return {key: value for key, value in SMALL.items() if known.get(key) is not None}


def _line(key: str, value: str | int) -> str:
    return "  " + yaml.safe_dump({key: value}, width=1000).strip()
