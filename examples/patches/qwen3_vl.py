"""Qwen3-VL whose vision tower runs in every step of training, so that ranks without images don't wait for others.

veomni patchgen examples/patches/qwen3_vl.py -o generated
"""

import torch

from veomni_patchgen import PatchConfig

config = PatchConfig(
    source_module="transformers.models.qwen3_vl.modeling_qwen3_vl",
    target_file="patched_modeling_qwen3_vl.py",
    description="Qwen3-VL that runs its vision tower on batches of text too",
)


@config.override_method("Qwen3VLVisionModel.dummy_forward", new=True, description="a zero that every weight is part of")
def dummy_forward(self):
    """Zero, computed from one blank image by every weight of the tower."""
    vision, side = self.config, 2 * self.spatial_merge_size
    # From a weight that the step computes with: under FSDP2 the stored ones may have another dtype.
    weight = self.patch_embed.proj.weight
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, side, side]], device=weight.device)
    seen = self(weight.new_zeros(side * side, values), grid_thw=grid, return_dict=True)
    return 0.0 * sum(features.sum() for features in (seen.pooler_output, *seen.deepstack_features))


@config.modify_method("Qwen3VLModel.forward", description="the vision tower runs in every step of training")
def model_forward(
    original_forward,
    self,
    *args,
    pixel_values=None,
    pixel_values_videos=None,
    mm_encoder_outputs=None,
    **kwargs,
):
    outputs = original_forward(
        self,
        *args,
        pixel_values=pixel_values,
        pixel_values_videos=pixel_values_videos,
        mm_encoder_outputs=mm_encoder_outputs,
        **kwargs,
    )
    if self.training and pixel_values is None and pixel_values_videos is None and mm_encoder_outputs is None:
        outputs.last_hidden_state = outputs.last_hidden_state + self.visual.dummy_forward()
    return outputs


@config.example
def tiny():
    """A model with two vision and two text layers, and a step of text alone."""
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    sizes = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision, "image_token_id": 60}
    return sizes, {"input_ids": ids, "labels": ids}
