"""Routes are sorted by expert and tiled once, and the products over them share their tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_triton_moe.moe_experts import launch
from veomni_triton_moe.moe_experts import routing as sorting
from veomni_triton_moe.moe_experts.routing import route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(0, 300),
    k=st.integers(1, 4),
    experts=st.integers(1, 40),
    highest=st.integers(0, 60),
    block_m=st.sampled_from([16, 64]),
    scanned=st.sampled_from([2, 4096]),
    seed=st.integers(0, 1000),
)
def test_routes_are_sorted_stably_and_tiled_once(tokens, k, experts, highest, block_m, scanned, seed):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, highest + 1, (tokens, k), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "_SCAN_BLOCKS", scanned)
        routing = route(index.to(DEVICE), experts, block_m)
    kept = torch.where(index < 0, experts, index).flatten().clamp(max=experts)
    _, order = kept.sort(stable=True)
    assert torch.equal(routing.route_of_row.cpu().long(), order)
    assert torch.equal(routing.row_of_route.cpu().long()[order], torch.arange(tokens * k))
    counts = torch.bincount(kept, minlength=experts + 1)[:experts]
    ends = counts.cumsum(0)
    assert routing.offsets.tolist() == [0, *ends.tolist()]
    count, *listed = routing.tiles[: 1 + 2 * routing.max_tiles].tolist()
    tiles = list(zip(listed[:count], listed[routing.max_tiles :][:count], strict=True))
    wanted = [
        (expert, row)
        for expert, (end, size) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True))
        for row in range(end - size, end, block_m)
    ]
    assert tiles == wanted


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("gate_up_size", [1, 2**30])
@pytest.mark.parametrize("rows_per_expert", [1, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_over_rows_share_their_tiles(dtype, rows_per_expert, gate_up_size, described):
    found = launch.launches(dtype, rows_per_expert, gate_up_size, described)
    assert found.block_m == found.gate_up.block_m == found.down.block_m
    assert found.block_m == found.dactivation.block_m == found.dhidden.block_m
    # The up-projection may go by pointers where the others do not, over the same list of tiles.
    assert found.block_m == launch.launches(dtype, rows_per_expert, gate_up_size, False).gate_up.block_m
