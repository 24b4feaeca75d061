"""``VeOmniPlugin``: kernels in the model that an Axolotl job trains, named in the job's YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from veomni_bridges.libraries import require

require("axolotl", "0.19", extra="axolotl")

from axolotl.integrations.base import BasePlugin  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from veomni_bridges import transformers, trl  # noqa: E402
from veomni_core import OpsConfig  # noqa: E402
from veomni_core.errors import BindingError, ConfigError  # noqa: E402

# Keys of Axolotl's job that put other code where kernels are bound, before the Trainer is made.
_REPLACING = (
    "chunked_cross_entropy",
    "cut_cross_entropy",
    "dense_mixer",
    "dpo_use_liger_kernel",
    "dsv4_*",
    "flash_attn_cross_entropy",
    "flash_attn_fuse_mlp",
    "fused_attn_kernel",
    "liger_*",
    "lora_*_kernel",
    "moe_grouped_backend",
    "tiled_mlp",
    "unsloth_*",
    "use_dsv4_kernels",
    "use_glm_dsa_kernels",
    "use_kernels",
    "use_scattermoe",
    "use_sonicmoe",
)


class VeOmniKeys(BaseModel):
    """What :class:`VeOmniPlugin` adds to the keys of Axolotl's job."""

    veomni: dict[str, Any] | None = None


class VeOmniPlugin(BasePlugin):  # type: ignore[misc]
    """Binds the model of an Axolotl job when its Trainer is made, by the config under the job's key ``veomni``.

    Supervised training and pretraining run on Axolotl's own Trainer, which computes the loss that the model's forward
    gives. Under ``rl`` and for reward models it is TRL's, which computes losses itself: see
    :class:`veomni_bridges.trl.VeOmniCallback`.

    Raises:
        HostError: when this module is imported, if Axolotl is missing or older than 0.19.
        ConfigError: before the model is loaded, if the job has no key ``veomni``, or its config is wrong.
        BindingError: before the model is loaded, if the job also asks for kernels of others, which replace the same
            forwards; or when the Trainer is made, as of the callbacks.

    Example of a job's lines::

        plugins:
          - veomni_bridges.axolotl.VeOmniPlugin
        veomni:
          preset: auto
    """

    def get_input_args(self) -> str:
        return f"{__name__}.{VeOmniKeys.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        if replaced := [f"{key}: {value}" for key, value in _replacing(cfg)]:
            raise BindingError(
                f"Axolotl would replace forwards that kernels are bound to, by {', '.join(replaced)}. Set each to "
                "false, and name kernels under veomni alone"
            )
        config = _config(cfg)
        OpsConfig.from_dict(config)
        by_trl = cfg.rl or cfg.reward_model or cfg.process_reward_model
        self._callback = (trl if by_trl else transformers).VeOmniCallback(config)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [self._callback]


def _config(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The config of kernels, as plain mappings."""
    written = cfg.get("veomni")
    if not isinstance(written, Mapping):
        raise ConfigError(
            "the job names veomni_bridges.axolotl.VeOmniPlugin, and has no mapping under the key veomni: write the "
            "kernels there, as veomni: {preset: auto}"
        )
    return {field: dict(value) if isinstance(value, Mapping) else value for field, value in written.items()}


def _replacing(cfg: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in sorted(cfg.items()):
        if value and any(fnmatch(key, pattern) for pattern in _REPLACING):
            yield key, value
