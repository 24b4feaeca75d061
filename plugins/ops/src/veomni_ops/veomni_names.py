"""Names of VeOmni's that are others here, or nothing: of ops, of values, and of what its guides import.

Pages and errors answer with the line to write instead. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

# What VeOmni's generated code calls ops that have another name here.
OPS: Mapping[str, str] = {
    "apply_rotary_pos_emb": "rotary_pos_emb",
    "moe_load_balancing_loss": "load_balancing_loss",
}
_BIND = (
    "nothing is of the process here. Write veomni_core.bind(model, ops), or "
    "build_foundation_model(..., ops_implementation=ops)"
)
_MODEL = "a plugin brings model types: write ModelSpec({}) in its hook veomni_models"
_TOKEN = "a model's placeholder is its own: write model.config.{}_token_id"
_SEQUENCE = "write from veomni_transformers.sequence import {}"
_PATCHGEN = "write from veomni_patchgen import {}"
# By each name that the guides import.
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("apply_ops_config", "set_ops_config", "apply_ops_patch", "apply_global_ops", "apply_per_model_patches"),
            *("apply_veomni_attention_patch", "apply_veomni_fused_moe_patch", "apply_veomni_loss_patch"),
            *("install_loss_mapping", "fused_moe_forward", "ForCausalLMLoss"),
        ),
        _BIND,
    ),
    "get_ops_config": "each model has its own: write veomni_core.binding_of(model).plan, or .receipt",
    "register_op": "write veomni_core.KERNEL_REGISTRY.register(KernelSpec(...))",
    "MODELING_REGISTRY": _MODEL.format("model_type=..., config=..., model=..."),
    "MODEL_CONFIG_REGISTRY": _MODEL.format("model_type=..., config=..., model=..."),
    "MODEL_PROCESSOR_REGISTRY": _MODEL.format("..., processor=..."),
    "CheckpointTensorConverter": _MODEL.format("..., converter=..."),
    "get_parallel_state": "process groups are arguments: write apply_ulysses(model, group), and distributed_config="
    "{'ep_size': ...} for transformers' engine",
    "_Gather": "write torch.cat(torch.distributed.nn.functional.all_gather(x, group), dim), which has a gradient",
    **{name: _SEQUENCE.format(name) for name in ("gather_heads_scatter_seq", "gather_seq_scatter_heads")},
    **{name: _SEQUENCE.format(name) for name in ("gather_outputs", "slice_input_tensor")},
    **{name: _SEQUENCE.format(name) for name in ("sp_pad_and_slice", "unpad_tensor")},
    **{name: _PATCHGEN.format(name) for name in ("PatchConfig", "create_patch_from_external")},
    **{f"{kind.upper()}_INPUT_INDEX": _TOKEN.format(kind) for kind in ("image", "video", "audio")},
    "IGNORE_INDEX": "write veomni_core.kernels.IGNORED, which is -100",
}
_FOR_SINGLE_MODELS = {
    "mhc_implementation": "manifold-constrained hyper-connections",
}


def line_for(name: str) -> str:
    """What to write in the place of a name that VeOmni's guides import; empty for any other name.

    Example:
        >>> line_for("register_op")
        'write veomni_core.KERNEL_REGISTRY.register(KernelSpec(...))'
        >>> line_for("bind")
        ''
    """
    return INSTEAD.get(name, "")


def only_veomnis(field: object) -> str:
    """What to do about a field that VeOmni has and no op here; empty for any other name.

    Example:
        >>> only_veomnis("mhc_implementation")
        'In VeOmni it chooses manifold-constrained hyper-connections; no op is here for that, so leave it out'
        >>> only_veomnis("rms_norm_implementation")
        ''
    """
    chosen = _FOR_SINGLE_MODELS.get(str(field))
    return f"In VeOmni it chooses {chosen}; no op is here for that, so leave it out" if chosen else ""


def only_elsewhere(value: str) -> str:
    """What to do about a kernel's name that is VeOmni's or the Hub's and not known here; empty for any other name.

    Example:
        >>> only_elsewhere("npu_ascendc")
        "VeOmni's AscendC kernels are not here; npu names those on torch_npu's operators"
    """
    if value == "npu_ascendc":
        return "VeOmni's AscendC kernels are not here; npu names those on torch_npu's operators"
    if value.count("/") == 1:
        return (
            "It reads like a repository of the Hugging Face Hub. List that under this name, with its commit and "
            "digests, in the file of VEOMNI_HUB_KERNELS (pip install veomni-hub), and run veomni verify veomni-hub"
        )
    return ""
