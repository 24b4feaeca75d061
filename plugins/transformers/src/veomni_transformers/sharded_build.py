"""Models that transformers' distributed engine shards while it builds them: no rank ever holds the whole model.

``from_pretrained(distributed_config=...)`` reads of each file what a rank keeps. Random weights are drawn here: all
ranks draw every parameter, one at a time, and each keeps its part, so the model does not depend on how it is sharded.
(The engine initialises each DTensor by itself, and on CPUs draws the same numbers for every rank's part.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedModel

from veomni_core.errors import ConfigError, HostError
from veomni_core.random_states import random_states_kept


def refuse_device(device: torch.device) -> None:
    """Raise unless the engine would put a model on ``device``: it takes the machine's accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    engine_device = "cpu" if accelerator is None else accelerator.type
    if device.type != engine_device:
        raise ConfigError(
            f"init_device is {device.type}, but transformers' engine builds sharded models on {engine_device} here; "
            f"write init_device='{engine_device}'"
        )


def refuse_world(distributed_config: Any) -> None:
    """Raise unless as many processes run as the sizes of ``distributed_config`` need."""
    sizes = {name: getattr(distributed_config, f"{name}_size") for name in ("pp", "dp_replicate", "fsdp", "tp")}
    needed = 1
    for size in sizes.values():
        needed *= size
    running = torch.distributed.get_world_size() if torch.distributed.is_initialized() else None
    if running is not None and running != needed:
        shown = " x ".join(f"{name}_size {size}" for name, size in sizes.items() if size > 1) or "sizes of 1"
        raise HostError(
            f"distributed_config needs {needed} processes ({shown}), but {running} run here. Start it as `torchrun "
            f"--nproc_per_node={needed}`, or change the sizes"
        )


def random_sharded_model(model_class: Any, config: Any, dtype: torch.dtype, distributed_config: Any) -> Any:
    """A model with random weights, the same whatever the layout, from the random state of rank 0."""
    seed = torch.randint(2**62, (1,), device="cpu")
    with random_states_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")  # what they draw is replaced below
        model = model_class.from_pretrained(
            None, config=config, state_dict={}, dtype=dtype, distributed_config=distributed_config
        )
        seed = seed.to(next(model.parameters()).device)
        torch.distributed.broadcast(seed, src=0)
        torch.manual_seed(int(seed))
        _draw(model, model)
    return model


def draw_whole(model: PreTrainedModel, names: Iterable[str], state: Tensor) -> None:
    """Draw the modules of the parameters ``names`` anew, from rank 0's random ``state``, as in a model that is whole.

    transformers draws what a checkpoint lacks part by part, so that all ranks' parts are the same numbers.
    """
    given = [state]
    torch.distributed.broadcast_object_list(given, src=0)
    torch.set_rng_state(given[0])
    for path in sorted({name.rpartition(".")[0] for name in names}):
        _draw(model.get_submodule(path), model)


def _draw(module: nn.Module, model: PreTrainedModel) -> None:
    """Initialise the parameters at and below ``module`` as the closest transformers model around it does."""
    model = module if isinstance(module, PreTrainedModel) else model
    for child in module.children():
        _draw(child, model)
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if not own:
        return
    whole: nn.Module = object.__new__(type(module))
    vars(whole).update(vars(module))
    vars(whole)["_parameters"] = {
        **dict.fromkeys(module._parameters),
        **{name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=False) for name, p in own.items()},
    }
    model._init_weights(whole)
    for name, parameter in own.items():
        _keep_part(parameter, whole._parameters[name])  # type: ignore[arg-type]


def _keep_part(parameter: Any, drawn: Tensor) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        if isinstance(parameter, DTensor):
            on_device = drawn.to(parameter.to_local().device)
            part = distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(drawn)
