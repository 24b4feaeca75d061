"""alltoall_dedup on gloo ranks: its contract, transformers' engine with and without it, and the rows that it sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import run_ranks
from veomni_conformance import check_kernel
from veomni_triton_moe.plugin import veomni_kernels

pytest.importorskip("transformers.distributed.expert_parallel")
(SPEC,) = (spec for spec in veomni_kernels() if spec.op_name == "token_dispatch")
START = f"""
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from dispatch_ranks import *
"""


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    report = check_kernel(SPEC, "cpu", dtype)
    report.raise_if_failed()
    assert {"odd counts", "an expert twice in a row"} <= {case.sample for case in report.cases}


@pytest.mark.thorough
def test_conformance_with_a_bound_on_its_rows():
    """130 rows for each rank: more than any rank has in the samples, so most are padding."""
    check_kernel(SPEC.configured("", {"max_tokens": 130}), "cpu", "bfloat16").raise_if_failed()


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_model_and_layout_gives_the_engine_s_loss_and_gradients(processes, tmp_path):
    output = run_ranks(
        START
        + f"""
    compared = 0
    for family in FAMILIES:
        saved({str(tmp_path)!r}, family)
        for layout in LAYOUTS[dist.get_world_size()]:
            model = sharded({str(tmp_path)!r}, family, layout)
            own, engines = step(model), [cell.cell_contents for cell in captured(model)]
            for options in ({{}}, {{"max_tokens": 40}}):
                binding = bound(model, {{"kernel": "alltoall_dedup", "options": options}})
                assert all(type(cell.cell_contents).__name__ == "KernelDispatch" for cell in captured(model))
                assert_equal(step(model), own, f"{{family}} {{layout}} {{options}}")
                binding.undo()
                compared += 1
            assert [cell.cell_contents for cell in captured(model)] == engines
            again = step(model)
            assert torch.equal(again[0], own[0])
            assert all(torch.equal(again[1][name], gradient) for name, gradient in own[1].items())
    print(compared)
    """,
        processes,
    )
    assert output[0].split() == [str(6 * {2: 2, 4: 3}[processes])]


@pytest.mark.thorough
def test_ways_in_which_a_bound_model_is_used(tmp_path):
    run_ranks(
        START
        + f"""
    folder = {str(tmp_path)!r}
    saved(folder, "qwen3_moe")

    # One token: of two ranks that share a batch, one has none.
    model = sharded(folder, "qwen3_moe", {{"tp_size": 2, "ep_size": 2}})
    ids = tokens(1, 1, seed=3)
    def loss_and_gradients():
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, use_cache=False).logits.square().mean()
        loss.backward()
        return loss.detach(), {{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
    own = loss_and_gradients()
    engine_logits = model(input_ids=ids, use_cache=False).logits
    binding = bound(model)
    found = loss_and_gradients()
    assert torch.allclose(found[0], own[0], rtol=1e-6) and found[1].keys() == own[1].keys()

    # At inference the engine's all-reduce stays: nothing is sent from rank to rank.
    with torch.no_grad():
        assert collectives(lambda: model(input_ids=ids, use_cache=False)) == []
    assert len(collectives(lambda: model(input_ids=ids, use_cache=False))) == 3 * 2  # of two layers
    assert list(binding.receipt.changed) == []

    # Gradient checkpointing computes each layer again in backward, and autocast rounds what travels.
    model = sharded(folder, "qwen3_moe", {{"fsdp_size": 2, "ep_size": 2}})
    own = step(model)
    bound(model)
    model.gradient_checkpointing_enable({{"use_reentrant": False}})
    assert_equal(step(model), own, "checkpointing")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = step(model)
    assert 0 < abs(rounded[0] - own[0]) < 2e-2

    # Kernels for experts and for this op are bound and unbound in any order.
    from veomni_core.changes.change import AttributeChange
    calls = []
    def experts_change(implementation, name):
        before = implementation.experts_forward
        return AttributeChange(implementation, "experts_forward", lambda *a: (calls.append(name), before(*a))[1])
    def made(change):
        change.apply()
        return change
    for experts_first in (True, False):
        for undo_experts_first in (True, False):
            model = sharded(folder, "qwen3_moe", {{"fsdp_size": 2, "ep_size": 2}})
            engines = [cell.cell_contents for cell in captured(model)]
            binding = None if experts_first else bound(model)
            targets = dict.fromkeys([*engines, *(cell.cell_contents for cell in captured(model))])
            changes = [made(experts_change(each, "experts")) for each in targets]
            binding = binding or bound(model)
            assert_equal(step(model), own, "both")
            assert calls, (experts_first, undo_experts_first)
            calls.clear()
            undone = [lambda: [change.revert() for change in reversed(changes)], binding.undo]
            for undo in undone if undo_experts_first else reversed(undone):
                undo()
                assert_equal(step(model), own, "one of them")
            calls.clear()
            step(model)
            assert not calls and [cell.cell_contents for cell in captured(model)] == engines
    """,
        2,
    )


@pytest.mark.thorough
def test_more_rows_than_the_bound_are_an_error_on_every_rank(tmp_path):
    outputs = run_ranks(
        START
        + f"""
    saved({str(tmp_path)!r}, "qwen3_moe")
    model = sharded({str(tmp_path)!r}, "qwen3_moe", {{"fsdp_size": 2, "ep_size": 2}})
    bound(model, {{"kernel": "alltoall_dedup", "options": {{"max_tokens": 10}}}})
    ids = tokens(2, 9) if dist.get_rank() else tokens(1, 2)  # rank 0 has no more than 10 itself
    try:
        model(input_ids=ids, use_cache=False)
    except RuntimeError as error:
        print(error)
    """,
        2,
    )
    for output in outputs:
        assert "a rank has more tokens for another rank than max_tokens allows" in output


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_it_sends_the_rows_that_are_counted(processes):
    run_ranks(
        START
        + """
    from types import SimpleNamespace
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed import expert_parallel
    from veomni_ops.dispatch_traffic import BY_CHOICE, BY_RANK, DispatchLayout, rows_sent
    from veomni_ops.expert_ranks import ExpertRanks
    from veomni_triton_moe.token_dispatch import alltoall_dedup

    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    layout = DispatchLayout(ranks=size, experts=16, choices=4, hidden=64, item_bytes=4)
    torch.manual_seed(rank)
    index = torch.rand(50 + rank, 16).argsort(dim=-1)[:, :4]
    hidden = torch.randn(len(index), 64, requires_grad=True)
    ranks = ExpertRanks(group, size, rank, layout.local_experts)
    called = lambda: alltoall_dedup()(hidden, index, torch.ones(len(index), 4), lambda rows, *_: rows, ranks)
    (_, _, count_bytes), (_, sent, row_bytes), (_, _, back_bytes) = collectives(called)
    others = [0 if each == rank else count for each, count in enumerate(sent)]
    assert others == rows_sent(BY_RANK, index, rank, layout)
    moved = sum(others) * (row_bytes + back_bytes) + count_bytes * (size - 1)
    assert moved == layout.bytes_of(BY_RANK, sum(others))

    meshes = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ep", "tp"))
    experts = SimpleNamespace(forward=lambda rows, *_: rows, num_experts=layout.local_experts)
    engine, seen = expert_parallel.AllToAllEP(experts, meshes["ep"], meshes["tp"]), []
    exchange = expert_parallel.all_to_all_single_autograd
    def noted(rows, incoming, outgoing, group):
        seen.append(outgoing)
        return exchange(rows, incoming, outgoing, group)
    expert_parallel.all_to_all_single_autograd = noted
    engine(hidden, index, torch.ones(len(index), 4))
    assert [0 if each == rank else count for each, count in enumerate(seen[0])] == rows_sent(
        BY_CHOICE, index, rank, layout
    )
    """,
        processes,
    )
