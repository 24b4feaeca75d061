"""Several processes: FSDP2 and DDP keep the kernels, and ranks that would differ are stopped, not left to hang."""

from __future__ import annotations

import pytest

from distributed import run_ranks

SHARDED = """
    import copy
    from torch.distributed.fsdp import fully_shard
    from models import EVERY_KERNEL, build, step, tokens
    from counting_kernels import calls, counting_registry
    from veomni_core import bind, binding_of

    rank = torch.distributed.get_rank()
    registry = counting_registry("one")
    family, when, shard_head = {family!r}, {when!r}, {shard_head!r}
    reference = build(family)
    model = build(family)
    if when == "before":
        bind(model, EVERY_KERNEL, registry=registry)
    for layer in model.model.layers:
        fully_shard(layer)
    if shard_head:
        fully_shard(model.lm_head)
    fully_shard(model)
    if when == "after":
        bind(model, EVERY_KERNEL, registry=registry)
    mine = tokens(2, 9, seed=rank)
    model(input_ids=mine, labels=mine, use_cache=False).loss.backward()
    for seed in range(2):
        ids = tokens(2, 9, seed=seed)
        (reference(input_ids=ids, labels=ids, use_cache=False).loss / 2).backward()
    wanted = dict(reference.named_parameters())
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad, rtol=1e-4, atol=1e-6)
            compared += 1
    assert compared > 10
    for op in ("rms_norm", "cross_entropy_loss", "rotary_pos_emb"):
        assert any(key[0] == op for key in calls), (op, calls)
    binding_of(model).undo()
    print("equal", compared)
"""


@pytest.mark.parametrize(
    "family, when, shard_head",
    [("llama", "before", False), ("qwen3_moe", "after", False), ("llama", "after", True)],
)
def test_fsdp2_on_two_processes_gives_the_gradients_of_one(family, when, shard_head):
    for output in run_ranks(SHARDED.format(family=family, when=when, shard_head=shard_head)):
        assert output.startswith("equal")


def test_ddp_on_two_processes_gives_the_gradients_of_one():
    run_ranks(
        """
        from torch.nn.parallel import DistributedDataParallel
        from models import EVERY_KERNEL, build, tokens
        from counting_kernels import counting_registry
        from veomni_core import bind

        rank = torch.distributed.get_rank()
        reference, model = build("llama"), build("llama")
        bind(model, EVERY_KERNEL, registry=counting_registry("one"))
        parallel = DistributedDataParallel(model)
        ids = tokens(2, 9, seed=rank)
        parallel(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for seed in range(2):
            ids = tokens(2, 9, seed=seed)
            (reference(input_ids=ids, labels=ids, use_cache=False).loss / 2).backward()
        for mine, wanted in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-4, atol=1e-6)
        """
    )


def test_a_difference_between_ranks_is_raised_on_every_rank_with_the_diff():
    outputs = run_ranks(
        """
        from models import build
        from counting_kernels import counting_registry
        from veomni_core import bind, binding_of
        from veomni_core.errors import PlanMismatchError

        kernel = ["one", "two"][torch.distributed.get_rank()]
        model = build("llama")
        try:
            config = {"preset": "eager", "rms_norm_implementation": kernel}
            bind(model, config, registry=counting_registry("one", "two"))
        except PlanMismatchError as error:
            assert binding_of(model) is None
            print(error)
        """
    )
    for output in outputs:
        assert "ranks would run different kernels" in output
        assert "rank 1: rms_norm: one -> two at 5 site(s)" in output


def test_a_rank_that_cannot_plan_stops_the_others():
    outputs = run_ranks(
        """
        from models import build
        from counting_kernels import counting_registry
        from veomni_core import bind
        from veomni_core.errors import VeOmniError

        rank = torch.distributed.get_rank()
        names = ["one", "two"] if rank == 0 else ["two"]
        config = {"preset": "eager", "rms_norm_implementation": "one" if rank == 0 else "triton"}
        try:
            bind(build("llama"), config, registry=counting_registry(*names))
        except VeOmniError as error:
            print(type(error).__name__, error)
        """
    )
    assert (
        "PlanMismatchError 1 of 2 ranks can't plan:\nrank 1: rms_norm_implementation: triton is not inst" in outputs[0]
    )
    assert outputs[1].startswith("KernelUnavailableError rms_norm_implementation: triton is not installed")
