"""Tiny models of images, video and audio, by model type, and inputs that they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from veomni_transformers.model_class import class_and_config

_WORDS, _IMAGE, _VIDEO, _AUDIO, _START, _END = 64, 60, 61, 62, 58, 59
_TEXT = {
    **{"vocab_size": _WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TOKENS = {"image_token_id": _IMAGE, "video_token_id": _VIDEO}
_MARKS = {"vision_start_token_id": _START, "vision_end_token_id": _END}
_QWEN2_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
_QWEN3_VISION = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_SIGLIP = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 4},
}
_OMNI_AUDIO = {
    **{"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 16},
    **{"max_source_positions": 64, "n_window": 8, "output_dim": 32},
}
_OMNI_TOKENS = {
    **{"image_token_index": _IMAGE, "video_token_index": _VIDEO, "audio_token_index": _AUDIO, **_TOKENS},
    **{"audio_token_id": _AUDIO, "vision_start_token_id": _START, "vision_end_token_id": _END},
    **{"audio_start_token_id": 56, "audio_end_token_id": 57},
}
_QWEN2_OMNI = {
    "text_config": {**_TEXT, "rope_parameters": _MROPE},
    "vision_config": {
        **_QWEN2_VISION,
        "embed_dim": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "fullatt_block_indexes": [1],
        "window_size": 16,
    },
    "audio_config": _OMNI_AUDIO,
    **_OMNI_TOKENS,
}
_QWEN3_OMNI = {
    "text_config": {**_TEXT, **_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_parameters": _MROPE},
    "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0]},
    "audio_config": {**_OMNI_AUDIO, "downsample_hidden_size": 8, "conv_chunksize": 4, "n_window_infer": 16},
    **_OMNI_TOKENS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN2_VISION, "embed_dim": 32, "mlp_ratio": 2},
        **_TOKENS,
        **_MARKS,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            **_QWEN2_VISION,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "fullatt_block_indexes": [1],
            "window_size": 16,
        },
        **_TOKENS,
        **_MARKS,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0]},
        **_TOKENS,
        **_MARKS,
    },
    "qwen3_vl_moe": {
        "text_config": {**_TEXT, **_EXPERTS, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0]},
        **_TOKENS,
        **_MARKS,
    },
    "qwen3_5": {
        "text_config": {**_TEXT, **_LINEAR, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        "vision_config": _QWEN3_VISION,
        **_TOKENS,
        **_MARKS,
    },
    "qwen3_5_moe": {
        "text_config": {
            **{**_TEXT, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0},
        },
        "vision_config": _QWEN3_VISION,
        **_TOKENS,
        **_MARKS,
    },
    "glm4v": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 4,
            "image_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "spatial_merge_size": 2,
        },
        **_TOKENS,
        **{"image_start_token_id": 54, "image_end_token_id": 55, "video_start_token_id": 52, "video_end_token_id": 53},
    },
    "gemma3": {
        "text_config": {**_TEXT, "query_pre_attn_scalar": 8, "sliding_window": 16},
        "vision_config": _SIGLIP,
        **{"mm_tokens_per_image": 4, "image_token_index": _IMAGE, "image_token_id": _IMAGE},
        **{"boi_token_index": _START, "eoi_token_index": _END},
    },
    "paligemma": {
        "text_config": {**_TEXT, "model_type": "gemma"},
        "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        **{"projection_dim": 32, "image_token_index": _IMAGE, "image_token_id": _IMAGE},
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32},
        **{"image_token_index": _IMAGE, "image_token_id": _IMAGE, "image_seq_length": 16},
    },
    "llava_next": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32},
        **{"image_token_index": _IMAGE, "image_token_id": _IMAGE, "image_grid_pinpoints": [[16, 16], [16, 32]]},
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_SIGLIP, "image_size": [16, 16], "patch_size": [4, 4]},
        **{"image_token_id": _IMAGE, "downsample_ratio": 0.5},
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
        **{"image_token_index": _IMAGE, "image_token_id": _IMAGE, "spatial_merge_size": 2},
    },
    "idefics3": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _SIGLIP,
        **{"image_token_id": _IMAGE, "scale_factor": 2},
    },
    "mllama": {
        "text_config": {**_TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1], "head_dim": None},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "max_num_tiles": 1,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
        },
        "image_token_index": _IMAGE,
    },
    "llama4": {
        "text_config": {**_TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 32},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "image_size": 16,
            "num_attention_heads": 4,
            "patch_size": 4,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        **{"image_token_index": _IMAGE, "image_token_id": _IMAGE},
    },
    "qwen2_audio": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": {
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 16,
            "max_source_positions": 8,
        },
        **{"audio_token_index": _AUDIO, "audio_token_id": _AUDIO},
    },
    "whisper": {
        **{"vocab_size": _WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"max_source_positions": 8, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1},
        **{"eos_token_id": 2, "decoder_start_token_id": 3, "begin_suppress_tokens": None},
    },
    "qwen2_5_omni_thinker": _QWEN2_OMNI,
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
}


def tiny_config(model_type: str, vocab_size: int = _WORDS) -> PretrainedConfig:
    """The config of the whole model: text decoder, towers and projector."""
    config = CONFIG_MAPPING[model_type](**CONFIGS[model_type])
    config.get_text_config().vocab_size = vocab_size
    return config


def tiny_model(model_type: str, seed: int = 0, vocab_size: int = _WORDS) -> PreTrainedModel:
    """A model in float32 on the CPU, in training mode."""
    torch.manual_seed(seed)
    kind, config = class_and_config(tiny_config(model_type, vocab_size))
    model: PreTrainedModel = kind._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # a gate that is closed would hide what is behind it
                parameter.normal_(std=0.1)
    return model.train()


def text_batch(rows: int = 2, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Tokens of text alone."""
    ids = torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def media_inputs(
    model_type: str, modality: str = "image", seed: int = 0, grid: Sequence[int] = (1, 4, 4)
) -> dict[str, Tensor]:
    """One image, video or sound, as the model's processor gives it; of so many frames, rows and columns of patches."""
    torch.manual_seed(seed)
    if model_type == "mllama":
        sizes = {"aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long)}
        return {
            "pixel_values": torch.randn(1, 1, 1, 3, 16, 16),
            **sizes,
            "aspect_ratio_mask": torch.ones(1, 1, 1).long(),
        }
    if model_type == "qwen2_audio":
        return {"input_features": torch.randn(1, 16, 16), "feature_attention_mask": torch.ones(1, 16).long()}
    if modality == "audio":
        length = 2 * grid[2]
        return {"input_features": torch.randn(1, 16, length), "feature_attention_mask": torch.ones(1, length).long()}
    name, kind = ("pixel_values", "image") if modality == "image" else ("pixel_values_videos", "video")
    if "depth" in CONFIGS[model_type]["vision_config"]:
        seconds = {"video_second_per_grid": torch.ones(1)} if "omni" in model_type and kind == "video" else {}
        shape = torch.tensor([grid])
        return {name: torch.randn(int(shape.prod()), 96), f"{kind}_grid_thw": shape, **seconds}
    images = {"idefics3": (1, 1), "llava_next": (1, 2)}.get(model_type, (1,))
    height, width = 4 * grid[1], 4 * grid[2]
    sizes = {"image_sizes": torch.tensor([[height, width]])} if model_type in ("llava_next", "mistral3") else {}
    return {name: torch.randn(*images, 3, height, width), **sizes}


def media_batch(
    model: Any, modality: str = "image", seed: int = 0, grid: Sequence[int] = (1, 4, 4)
) -> dict[str, Tensor]:
    """A row of text with one image, video or sound in it; the placeholders are as many as the model makes features."""
    model_type = model.config.model_type
    inputs = media_inputs(model_type, modality, seed, grid)
    rows = {"mllama": 1, "qwen2_audio": 4}.get(model_type) or _features(model, modality, inputs)
    token = {"image": _IMAGE, "video": _VIDEO, "audio": _AUDIO}[modality]
    as_images = model_type == "glm4v" and modality == "video"  # whose videos are tokens of images, of another kind
    token = _IMAGE if as_images else token
    text = text_batch(1, 12, seed)["input_ids"]
    marks = [] if modality == "audio" else [torch.tensor([[_START]]), torch.tensor([[_END]])]
    placeholders = torch.full((1, rows), token)
    ids = torch.cat([text[:, :4], *marks[:1], placeholders, *marks[1:], text[:, 4:]], dim=1)
    if model_type == "mllama":  # each token behind the image sees it
        inputs["cross_attention_mask"] = (torch.arange(ids.shape[1]) >= 5).long().view(1, -1, 1, 1)
    batch = with_kinds(model_type, {"input_ids": ids, "labels": ids.masked_fill(ids == token, -100), **inputs})
    return {**batch, "mm_token_type_ids": 2 * batch["mm_token_type_ids"]} if as_images else batch


def mixed_batch(model: Any, modalities: Sequence[str]) -> dict[str, Tensor]:
    """A row with one medium of each of the ``modalities``, and a row of text alone, which is padded."""
    parts = [media_batch(model, each, seed) for seed, each in enumerate(modalities)]
    ids = torch.cat([each["input_ids"] for each in parts], dim=1)
    text = text_batch(1, 12, 7)["input_ids"]
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, 12:] = 0
    media = {name: value for each in parts for name, value in each.items() if "ids" not in name and name != "labels"}
    ids = torch.cat([ids, torch.nn.functional.pad(text, (0, ids.shape[1] - 12))])
    labels = ids.masked_fill((mask == 0) | torch.isin(ids, torch.tensor([_IMAGE, _VIDEO, _AUDIO])), -100)
    return with_kinds(model.config.model_type, {**media, "input_ids": ids, "attention_mask": mask, "labels": labels})


def _features(model: Any, modality: str, inputs: dict[str, Tensor]) -> int:
    """How many features the model makes of ``inputs``."""
    around = next(each for each in model.modules() if hasattr(type(each), f"get_{modality}_features"))
    with torch.no_grad():
        inputs = {name: value for name, value in inputs.items() if not name.startswith("video_second")}
        output = getattr(around, f"get_{modality}_features")(**inputs)
    features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return sum(
        each.flatten(0, -2).shape[0] for each in (features if isinstance(features, list | tuple) else [features])
    )


def with_kinds(model_type: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``batch`` with the kind of each token, for the models that want it."""
    kinds = (batch["input_ids"] == _IMAGE).long() + 2 * (batch["input_ids"] == _VIDEO)
    if model_type in ("gemma3", "paligemma"):
        return {**batch, "token_type_ids": kinds}
    if model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"):
        return {**batch, "mm_token_type_ids": kinds}
    return batch
