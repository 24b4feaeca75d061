"""Which inputs of towers can be divided over ranks, as small copies of the towers show, and into which parts."""

from __future__ import annotations

import pytest
import torch
from tiny_multimodal import tiny_model
from torch import nn

from veomni_core.errors import ConfigError
from veomni_transformers.towers.division import division_of
from veomni_transformers.towers.feature_calls import feature_calls

WHOLE, BY_FRAMES = "whole media", "frames"
OF_FAMILIES = {
    **{name: {"image": WHOLE} for name in ("gemma3", "paligemma", "llava", "llava_next", "internvl", "mistral3")},
    **{name: {"": BY_FRAMES} for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")},
    "glm4v": {"image": WHOLE, "video": BY_FRAMES},  # its pictures have one frame
    "qwen2_5_omni_thinker": {"audio": WHOLE, "image": BY_FRAMES, "video": BY_FRAMES},
    "qwen3_omni_moe_thinker": {"audio": "depend on the others", "image": BY_FRAMES, "video": BY_FRAMES},
    "idefics3": {"image": "given alone, some images of a batch end in RuntimeError"},  # it leaves out zeros
    "mllama": {"": "its forward runs towers itself"},
    "llama4": {"": "its forward runs multi_modal_projector besides"},
}


def divisions(model):
    return [division_of(model.get_submodule(path), call) for path, calls in feature_calls(model) for call in calls]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_what_can_be_divided(family):
    wanted = OF_FAMILIES[family]
    for found in divisions(tiny_model(family)):
        said = wanted.get(found.call.modality, wanted.get(""))
        assert said in (found.why_not or (BY_FRAMES if found.by_frames else WHOLE)), found


class OverAll(nn.Module):
    """What a tower does that lets pictures see one another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        features = self.inner(*args, **kwargs)
        return features - features.mean(0, keepdim=True)


def test_features_that_depend_on_a_batch_are_seen():
    model = tiny_model("llava")
    model.model.multi_modal_projector = OverAll(model.model.multi_modal_projector)
    (found,) = divisions(model)
    assert found.why_not == "features of images depend on the others of the batch"
    model = tiny_model("internvl")
    model.model.vision_tower.after = nn.BatchNorm1d(4)  # which a copy in evaluation would not show
    assert "batch norms" in divisions(model)[0].why_not


def test_parts_are_neighbours_of_equal_work():
    division = divisions(tiny_model("qwen2_vl"))[1]
    grids = torch.tensor([[6, 2, 2], [1, 4, 4], [1, 2, 2]])
    pixels = torch.arange(44).view(44, 1)
    given = {"pixel_values_videos": pixels, "video_grid_thw": grids, "video_cu_seqlens": grids, "return_dict": True}
    parts = division.parts(given, 2)
    assert [part.inputs["video_grid_thw"].tolist() for part in parts] == [
        [[5, 2, 2]],
        [[1, 2, 2], [1, 4, 4], [1, 2, 2]],
    ]
    assert torch.cat([part.inputs["pixel_values_videos"] for part in parts]).equal(pixels)
    assert [part.numbers for part in division.parts(given, 4)] == [(0,), (0,), (0, 1), (2,)]
    assert all("video_cu_seqlens" not in part.inputs and part.inputs["return_dict"] for part in parts)
    one = division.parts({"pixel_values_videos": pixels[:4], "video_grid_thw": grids[2:]}, 4)
    assert [part.stands_in for part in one] == [True, True, False, True]
    assert all(part.inputs["pixel_values_videos"].equal(pixels[:4]) for part in one)


def test_an_argument_of_other_rows_is_an_error():
    (division,) = divisions(tiny_model("mistral3"))
    sizes = torch.tensor([[16, 16]])
    with pytest.raises(ConfigError, match="image_sizes has 1 rows for 2; call the model with one row for each"):
        division.parts({"pixel_values": torch.zeros(2, 3, 16, 16), "image_sizes": sizes}, 2)
