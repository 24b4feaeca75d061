"""``kernels``: a kernel plugin for the v1 engine of LLaMA-Factory, which the user's script registers under a name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from veomni_bridges.libraries import require
from veomni_bridges.losses import with_eager_losses
from veomni_bridges.receipts import receipt_text
from veomni_core import OpsConfig, bind
from veomni_core.errors import BindingError, ConfigError

_NOTE = "LLaMA-Factory's v1 trainers compute the loss from the logits. So the model's own losses are left eager"


def kernels(*, verify: bool = False, **fields: Any) -> Callable[..., nn.Module]:
    """A function for LLaMA-Factory's ``KernelPlugin(NAME).register()``, which binds the model that it is given.

    A job whose ``kernel_config`` has that name calls it with its ``include_kernels``, which names the preset. The model
    is loaded and has its adapters then, and neither checkpointing, nor the optimizer, nor
    ``DistributedDataParallel`` has seen it. The first process prints the receipt.

    The engine computes its loss from the logits. So the model's own losses are left eager.

    Args:
        verify: first check every chosen kernel and site, as ``bind(verify=True)``.
        **fields: the config's other fields, as ``moe_implementation="grouped_mm"``.

    Raises:
        ConfigError: at once, if a field is wrong, the preset is given here, or a kernel is named for a loss; when a job
            runs, if ``include_kernels`` names no preset.
        HostError: when a job runs, if LLaMA-Factory is older than 0.9.5.
        BindingError: when a job runs, if it has a ``dist_config``; or as of :func:`veomni_core.bind`.
    """
    if "preset" in fields:
        raise ConfigError("the job names the preset: write it as include_kernels under kernel_config, and not here")
    config = with_eager_losses(fields, "LLaMA-Factory's v1 trainers")
    OpsConfig.from_dict(config)

    def bound(model: nn.Module, include_kernels: str | bool | None = None) -> nn.Module:
        require("llamafactory", "0.9.5", extra="llama-factory")
        _refuse_sharding()
        if not isinstance(include_kernels, str):
            raise ConfigError(
                f"kernel_config has include_kernels: {include_kernels}, which names no preset. Write "
                "include_kernels: auto, or leave kernel_config out"
            )
        binding = bind(model, {"preset": include_kernels, **config}, verify=verify)
        if os.environ.get("RANK", "0") == "0":
            print(receipt_text(binding.receipt, [_NOTE]))
        return model

    return bound


def _refuse_sharding() -> None:
    """Raise where the job takes the model apart after it is bound."""
    from llamafactory.v1.accelerator.interface import DistributedInterface

    if sharding := DistributedInterface().dist_config:
        raise BindingError(
            f"the job has dist_config: {dict(sharding)}, and bound models were not tested with LLaMA-Factory's "
            "sharding. Leave dist_config out; several processes then train by DistributedDataParallel"
        )
