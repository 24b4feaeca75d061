"""Whether transformers' tensor parallelism has divided an output projection by words, some of them on each rank."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from veomni_core.changes.engine_forwards import engine_forward


def why_not_sharded_by_words(head: Any) -> str:
    """Why ``head`` is no linear that the engine has sharded by words and whose forward gathers the logits; else empty.

    The engine's styles ``colwise_gather_output`` and ``colwise_rep`` do so, under FSDP2 too. The module is only read.
    """
    installed = _installed_by_transformers(head)
    if installed is None:
        return "the output projection has no forward that transformers' tensor parallelism put there"
    style, mesh, original = installed["self"], installed["mesh"], installed["original_forward"]
    name = type(style).__name__
    from torch.distributed.tensor import Replicate

    if name != "ColwiseParallel" or style.output_layouts != Replicate() or not style.use_local_output:
        return f"the output projection's logits are not sharded by words and gathered: its style is {name}"
    if getattr(head, "_hf_quantized_needs_local_tp", False):
        return "the output projection is quantized"
    if getattr(original, "__func__", None) is not nn.Linear.forward or hasattr(head, "parametrizations"):
        return "the output projection does not compute torch's linear over its own parameters"
    for parameter in ("weight", "bias"):
        tensor = getattr(head, parameter)
        if tensor is not None and not _is_sharded_by_words(tensor, mesh):
            return f"the output projection's {parameter} is not sharded by words over the ranks of {mesh}"
    return ""


def _installed_by_transformers(head: Any) -> dict[str, Any] | None:
    """What the engine's forward on the instance closes over: ``self``, which is its style, ``mesh`` and more."""
    forward = engine_forward(head)
    if forward is None:
        return None
    captured = dict(inspect.getclosurevars(forward).nonlocals)
    known = {"self", "mesh", "module", "original_forward"} <= captured.keys() and captured["module"] is head
    return captured if known else None


def _is_sharded_by_words(tensor: Any, mesh: Any) -> bool:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(tensor, DTensor) or mesh.ndim != 1:
        return False
    names, (dimension,) = tensor.device_mesh.mesh_dim_names or (), mesh.mesh_dim_names or ("",)
    if dimension not in names:
        return False
    placement = tensor.placements[names.index(dimension)]
    return isinstance(placement, Shard) and placement.dim % tensor.ndim == 0
