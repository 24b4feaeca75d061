"""A fused loss under FSDP2: its hooks run as without binding, and the output projection runs once in each step.

FSDP2's groups are watched from inside, since a hook that doesn't run shows in no gradient until a weight is not there.
"""

from __future__ import annotations

import pytest

from distributed import run_ranks

# Each layout is compared with itself unbound, over the same steps.
COMPARED = """
    import gc, logging, sys, tempfile, warnings
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from models import EVERY_KERNEL, build, tokens
    from veomni_core import bind, token_logprobs
    from veomni_core.errors import LogitsGoneError

    rank = torch.distributed.get_rank()
    FUSED = {{"preset": "eager", "cross_entropy_loss_implementation": "auto"}}
    events, warned = [], []

    def watch(name):
        own = getattr(FSDPParamGroup, name)

        def watched(group, *args, **kwargs):
            events.append((name, [type(module).__name__ for module in group.modules]))
            return own(group, *args, **kwargs)

        setattr(FSDPParamGroup, name, watched)

    HOOKS = ("pre_forward", "post_forward", "pre_backward", "post_backward", "finalize_backward")
    for name in (*HOOKS, "_to_unsharded", "_to_sharded"):
        watch(name)
    warnings.showwarning = lambda message, *rest: warned.append(str(message))
    record = logging.Handler()
    record.emit = lambda entry: warned.append(entry.getMessage())
    logging.getLogger("torch.distributed.fsdp.fully_shard").addHandler(record)  # torch up to 2.12 warns there

    def by_transformers(tied=False, **settings):
        from transformers.distributed import DistributedConfig

        model = build("llama", tie_word_embeddings=tied)
        folder = [tempfile.mkdtemp()] if rank == 0 else [None]
        torch.distributed.broadcast_object_list(folder)
        if rank == 0:
            model.save_pretrained(folder[0])
        torch.distributed.barrier()
        config = DistributedConfig(fsdp_size=2, **settings)
        return type(model).from_pretrained(folder[0], distributed_config=config).train()

    def by_hand(units=lambda model: model.lm_head, reshard=True, tied=False, **settings):
        model = build("llama", tie_word_embeddings=tied)
        for layer in model.model.layers:
            fully_shard(layer, **settings)
        if not tied:
            fully_shard(units(model), reshard_after_forward=reshard, **settings)
        fully_shard(model, **settings)
        return model

    def step(model, seed=0):
        ids = tokens(2, 9, seed=10 * seed + rank)
        return model(input_ids=ids, labels=ids, use_cache=False)

    def two(model):
        step(model).loss.backward()
        step(model, 1).loss.backward()

    def accumulated(model):
        model.set_requires_gradient_sync(False)
        step(model).loss.backward()
        model.set_requires_gradient_sync(True)
        step(model, 1).loss.backward()

    def evaluated_between(model):
        step(model).loss.backward()
        with torch.no_grad():
            step(model.eval(), 1)
            step(model.train(), 2)
        step(model.eval(), 3)
        step(model.train(), 4).loss.backward()

    def recomputed(model):
        model.gradient_checkpointing_enable()
        two(model)

    def read(model):
        output = step(model)
        logits = output.logits + 0
        output.loss.backward()
        return logits.detach()

    def compiled(model):
        torch._dynamo.reset()
        model.compile(backend="eager")
        two(model)

    SCORED = {{"preset": "eager", "token_logprobs_implementation": "auto"}}

    def scored(model):
        for seed in (0, 1):
            ids = tokens(2, 9, seed=10 * seed + rank)
            found = token_logprobs(model, ids, outputs=("logprobs", "entropy"))
            (found.logprobs.mean() + found.entropy.mean()).backward()
        return found.logprobs.detach()

    def whole_copies(model, whole):
        '''Weights of the whole head that are in memory.'''
        # By type, since isinstance would look through dead weak proxies.
        found = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
        found = [each.detach() for each in found if each.shape == whole.shape and each.untyped_storage().size()]
        return len({{each.untyped_storage().data_ptr() for each in found if torch.equal(each.to(whole.dtype), whole)}})

    def run(make, steps, config):
        model = make()
        if config is not None:
            bind(model, config)
        calls = {{"head": 0, "norm": 0}}
        for name, module in (("head", model.lm_head), ("norm", model.model.norm)):
            module.register_forward_hook(lambda *_, name=name: calls.update({{name: calls[name] + 1}}))
        events.clear(), warned.clear()
        result = steps(model)
        gradients = {{n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}}
        return model, list(events), [each for each in warned if "deprecated" not in each], calls, gradients, result

    def compare(make, steps=two, config=FUSED, gathered_again=0, hooks=HOOKS, rtol=1e-4):
        _, wanted_events, wanted_warnings, wanted_calls, wanted, wanted_result = run(make, steps, None)
        model, found_events, found_warnings, calls, found, result = run(make, steps, config)
        assert found_warnings == wanted_warnings, found_warnings
        assert calls == wanted_calls, (calls, wanted_calls)
        assert calls["head"] == calls["norm"]
        chosen = lambda all_events: [each for each in all_events if each[0] in hooks]
        assert chosen(found_events) == chosen(wanted_events)
        count = lambda all_events, name: sum(each[0] == name for each in all_events)
        for name in ("_to_unsharded", "_to_sharded"):
            assert count(found_events, name) == count(wanted_events, name) + gathered_again, name
        assert found.keys() == wanted.keys()
        for name in wanted:
            close = (found[name] - wanted[name]).norm() <= rtol * wanted[name].norm()
            assert close, (name, (found[name] - wanted[name]).norm() / wanted[name].norm())
        if result is not None:
            torch.testing.assert_close(result, wanted_result, rtol=rtol, atol=1e-5)

    def copies_during_a_step(make, config):
        model = make()
        if config is not None:
            bind(model, config)
        whole = model.lm_head.weight.full_tensor().detach()
        counts = []
        output = step(model)
        counts.append(whole_copies(model, whole) - 1)
        output.loss.backward()
        del output
        counts.append(whole_copies(model, whole) - 1)
        return counts

    {cases}
    print("compared")
"""

BF16 = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"


def compare(cases: str) -> None:
    # Bodies are dedented as one text, so the cases take the indentation of the rest.
    body = COMPARED.format(cases=cases.strip().replace("\n", "\n    "))
    assert run_ranks(body) == ["compared\n"] * 2


@pytest.mark.thorough
def test_under_transformers_engine_which_puts_the_last_norm_and_the_head_into_one_group():
    pytest.importorskip("transformers.distributed.fsdp", reason="this transformers has no engine of its own")
    compare(
        """
for steps in (two, accumulated, evaluated_between, recomputed, read):
    compare(by_transformers, steps)
compare(by_transformers, two, EVERY_KERNEL)
compare(lambda: by_transformers(tied=True), two)
compare(lambda: by_transformers(tied=True), evaluated_between, EVERY_KERNEL)
compare(lambda: by_transformers(fsdp_mixed_precision=True), accumulated, rtol=3e-2)
# The head of a compiled step returns no tensor, so FSDP2 has nowhere to put its hook before the backward.
compare(by_transformers, compiled, hooks=("pre_forward", "post_forward", "finalize_backward"))
assert copies_during_a_step(by_transformers, FUSED) == copies_during_a_step(by_transformers, None) == [1, 0]
"""
    )


@pytest.mark.thorough
def test_under_fully_shard_of_the_head_by_itself_or_with_the_norm():
    compare(
        f"""
kept = lambda: by_hand(reshard=False)
for steps in (two, accumulated, evaluated_between, recomputed, read):
    compare(kept, steps)
# The loss comes after the head's forward, which shards the weight again: each training step gathers it once more.
compare(by_hand, two, gathered_again=2)
compare(by_hand, accumulated, EVERY_KERNEL, gathered_again=2)
compare(by_hand, evaluated_between, gathered_again=2 + 1)
compare(lambda: by_hand(mp_policy={BF16}), two, gathered_again=2, rtol=3e-2)
compare(lambda: by_hand(lambda model: [model.model.norm, model.lm_head]), two, gathered_again=2)
compare(lambda: by_hand(tied=True), two)
assert copies_during_a_step(kept, FUSED) == copies_during_a_step(kept, None) == [1, 0]
assert copies_during_a_step(by_hand, FUSED) == copies_during_a_step(by_hand, None) == [0, 0]
model = by_hand()
bind(model, FUSED)
try:
    step(model).logits + 0
except LogitsGoneError as gone:
    assert "was sharded again since" in str(gone)
else:
    raise AssertionError("logits were computed without their weight")
"""
    )


@pytest.mark.thorough
def test_a_compiled_step_gathers_a_weight_that_was_sharded_after_the_heads_forward():
    compare(
        """
forwards = ("pre_forward", "post_forward", "finalize_backward")
computed = {**FUSED, "training_logits": "computed"}
for units in (lambda model: model.lm_head, lambda model: [model.model.norm, model.lm_head]):
    compare(lambda: by_hand(units), compiled, gathered_again=2, hooks=forwards)
    compare(lambda: by_hand(units), compiled, computed, gathered_again=4, hooks=forwards)
"""
    )


def test_log_probabilities_of_sharded_models():
    compare(
        """
kept = lambda: by_hand(reshard=False)
compare(kept, scored, SCORED)
# They are computed after the head's forward, which shards the weight again.
compare(by_hand, scored, SCORED, gathered_again=2)
compare(lambda: by_hand(tied=True), scored, SCORED)
compare(lambda: by_hand(mp_policy=BF16), scored, SCORED, gathered_again=2, rtol=3e-2)
""".replace("BF16", BF16)
    )
