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
    calls.clear()
    model(input_ids=mine, labels=mine, use_cache=False).loss.backward()
    assert not calls, "undo takes the kernels out of classes that FSDP2 put over ours"
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


def test_ranks_that_do_not_come_are_named_within_the_time_limit_and_may_come_later():
    outputs = run_ranks(
        """
        from models import build
        from counting_kernels import counting_registry
        from veomni_core import bind
        from veomni_core.errors import PlanMismatchError

        registry, config = counting_registry("one"), {"preset": "eager", "rms_norm_implementation": "one"}
        if torch.distributed.get_rank() == 1:
            try:
                bind(build("llama"), config, registry=registry, agreement_timeout=2)
            except PlanMismatchError as error:
                print(error)
            bind(build("qwen3"), config, registry=registry, agree=False)
            print("alone")
        torch.distributed.barrier()
        bind(build("llama"), config, registry=registry)
        print("together")
        bind(build("qwen3"), config, registry=registry)
        print("again")
        """,
        processes=3,
    )
    assert outputs[0] == outputs[2] == "together\nagain\n"
    why, *rest = outputs[1].splitlines()
    assert "rank 0, 2 of 0, 1, 2 sent no plan within 2 s" in why
    assert "pass agree=False, or group= their process group" in why
    assert rest == ["alone", "together", "again"]


def test_ranks_of_a_group_agree_among_themselves():
    outputs = run_ranks(
        """
        from torch import distributed
        from models import build
        from counting_kernels import counting_registry
        from veomni_core import bind
        from veomni_core.errors import BindingError, PlanMismatchError

        rank = distributed.get_rank()
        stages = [distributed.new_group([0, 1]), distributed.new_group([2])]
        model = build("llama", num_hidden_layers=2 if rank < 2 else 3)
        config = {"preset": "eager", "rms_norm_implementation": "one"}
        binding = bind(model, config, registry=counting_registry("one"), group=stages[rank // 2])
        print(sum(decision.bound for op in binding.plan.ops for decision in op.sites))
        binding.undo()
        try:
            bind(model, config, registry=counting_registry("one"), group=stages[1 - rank // 2])
        except BindingError as error:
            print(type(error).__name__)
        try:
            bind(model, config, registry=counting_registry("one"))
        except PlanMismatchError as error:
            print("a pipeline" in str(error), "no site -> one" in str(error))
        """,
        processes=3,
    )
    assert [output.splitlines()[0] for output in outputs] == ["5", "5", "7"]
    assert [output.splitlines()[1] for output in outputs] == ["BindingError"] * 3
    assert [output.splitlines()[2] for output in outputs] == ["True True"] * 3


@pytest.mark.thorough
def test_ranks_that_nothing_compares_do_not_bind_by_themselves():
    outputs = run_ranks(
        """
        import sys
        from models import build
        from counting_kernels import counting_registry
        from veomni_core import bind, binding_of
        from veomni_core.errors import BindingError

        class Absent:
            @staticmethod
            def find_spec(name, *_):
                if name == "veomni_conformance":
                    raise ModuleNotFoundError(name, name=name)

        sys.meta_path.insert(0, Absent)
        for name in [each for each in sys.modules if each.startswith("veomni_conformance")]:
            del sys.modules[name]
        model, registry = build("llama"), counting_registry("one")
        config = {"preset": "eager", "rms_norm_implementation": "one"}
        try:
            bind(model, config, registry=registry)
        except BindingError as error:
            print(error)
        assert binding_of(model) is None
        assert bind(model, config, registry=registry, agree=False).active
        """
    )
    for output in outputs:
        assert output.startswith("ranks must agree on the plan, or bind with agree=False; veomni-conformance is not")
