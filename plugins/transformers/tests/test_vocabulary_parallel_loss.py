"""The loss of a head that transformers' tensor parallelism has sharded by words: as one process, without the logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distributed import run_ranks
from models import build
from veomni_core.errors import BindingError
from veomni_core.sites.site import Site
from veomni_transformers.losses.causal import CausalLosses
from veomni_transformers.losses.sharded_head import why_not_sharded_by_words

RANKS = """
    import logging, tempfile
    import transformers
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers.distributed import DistributedConfig
    from counting_kernels import calls, counting__cross_entropy_loss__vocabulary_parallel__one as kernel
    from models import build
    from veomni_core.changes.change_set import ChangeSet
    from veomni_core.errors import ShardedLogitsError
    from veomni_transformers.forwards.deferred_tensor import DeferredTensor
    from veomni_transformers.losses.causal import CausalLosses
    from veomni_core.sites.site import Site

    transformers.utils.logging.disable_progress_bar()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ITEMS = 23

    def sharded(model, **sizes):
        folder = [tempfile.mkdtemp()] if rank == 0 else [None]
        torch.distributed.broadcast_object_list(folder)
        if rank == 0:
            model.save_pretrained(folder[0])
        torch.distributed.barrier()
        return type(model).from_pretrained(folder[0], distributed_config=DistributedConfig(**sizes)).train()

    def bound(model, training_logits="deferred"):
        site = Site("cross_entropy_loss", "", "causal losses", "vocabulary_parallel", "")
        changes = ChangeSet(training_logits=training_logits)
        changes.classes.binding = changes
        for change in CausalLosses().install(model, site, kernel, None):
            changes.apply(change)
        return changes

    def batch(model, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, model.config.vocab_size, (2, 9), generator=generator)
        labels = ids.clone()
        labels[0, :4], labels[1, -2:] = -100, -100
        return {{"input_ids": ids, "labels": labels, "use_cache": False}}

    def full(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    class Logits(TorchDispatchMode):
        '''Counts the tensors in memory whose last dimension is the whole vocabulary's.'''

        def __init__(self, words):
            super().__init__()
            self.words, self.found = words, 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            for each in args:
                if isinstance(each, DeferredTensor):  # called from here, the operator would be another Python call
                    return type(each).__torch_dispatch__(operator, types, args, kwargs)
            result = operator(*args, **(kwargs or {{}}))
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor) and not isinstance(each, (DeferredTensor, DTensor)):
                    self.found += each.dim() > 1 and each.shape[-1] == self.words and each.device.type != "meta"
            return result

    def equal_one_process(family, layout, options={{}}, **overrides):
        whole = build(family, num_key_value_heads=4, **overrides)
        model = sharded(whole, **layout)
        mesh = model._mesh_manager.get_mesh("fsdp")
        replicas, replica = mesh.size(), mesh.get_local_rank()
        wanted = sum(whole(**batch(whole, seed), **options).loss for seed in range(replicas)) / replicas
        wanted.backward()
        before = vars(model.lm_head)["forward"]
        changes = bound(model)
        for each in (None, "again"):
            model.zero_grad()
            calls.clear()
            with Logits(whole.config.vocab_size) as logits:
                output = model(**batch(model, replica), **options)
                loss = output.loss.detach().clone()
                output.loss.backward()
            assert calls.total() == 1 and logits.found == 0, (calls, logits.found)
        assert output.logits.shape == (2, 9, whole.config.vocab_size)
        torch.distributed.all_reduce(loss)
        torch.testing.assert_close(loss / world, wanted.detach(), rtol=1e-6, atol=0)
        found = dict(model.named_parameters())
        worst, layouts = 0.0, {{}}
        for name, parameter in whole.named_parameters():
            gradient = found[name].grad
            layouts[name] = getattr(gradient, "placements", None)
            miss = ((full(gradient) - parameter.grad).norm() / parameter.grad.norm()).item()
            assert miss < 1e-6, (name, miss)
            worst = max(worst, miss)
        try:
            output.logits + 0
        except ShardedLogitsError as error:
            assert "training_logits: computed" in str(error) and "over" in str(error)
        else:
            raise AssertionError("logits of all ranks came from one")
        changes.revert()
        assert vars(model.lm_head)["forward"] is before
        # The engine's own step: its gradients have the same layouts, and this test would see its logits.
        calls.clear(), model.zero_grad()
        with Logits(whole.config.vocab_size) as logits:
            model(**batch(model, replica), **options).loss.backward()
        assert logits.found and not calls
        assert layouts == {{n: getattr(p.grad, "placements", None) for n, p in found.items()}}
        return f"{{worst:.0e}}"

    {cases}
    print("equal")
"""


def on_ranks(cases: str, processes: int) -> None:
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="this transformers has no engine of its own")
    body = RANKS.format(cases=cases.strip().replace("\n", "\n    "))
    assert run_ranks(body, processes) == ["equal\n"] * processes


@pytest.mark.thorough
def test_two_ranks():
    on_ranks(
        """
tp = dict(tp_size=2)
equal_one_process("llama", tp)
equal_one_process("llama", tp, {"num_items_in_batch": ITEMS}, vocab_size=61)
equal_one_process("llama", tp, tie_word_embeddings=True, vocab_size=61)
equal_one_process("gemma2", tp, final_logit_softcapping=2.0, tie_word_embeddings=True)
equal_one_process("granite", tp, {"num_items_in_batch": torch.tensor(ITEMS)}, logits_scaling=4.0)

# Computed logits are the engine's own, gathered; so are those of a step without a loss to fuse.
whole = build("llama")
model = sharded(whole, **tp)
changes = bound(model, "computed")
calls.clear()
output, wanted = model(**batch(model, 0)), whole(**batch(whole, 0))
torch.testing.assert_close(output.logits, wanted.logits)
torch.testing.assert_close(output.loss, wanted.loss)
assert not calls and "gathered" not in changes.classes.changed
assert "needs all logits" in changes.classes.changed["the loss"]
changes.revert()
bound(model)
torch.testing.assert_close(model(input_ids=batch(model, 0)["input_ids"]).logits, wanted.logits)
torch.testing.assert_close(model.eval()(**batch(model, 0)).loss, wanted.loss)
assert not calls
# No label counts: as by the contract of the loss, 0 with gradients of 0.
inputs = batch(model, 0)
inputs["labels"] = torch.full_like(inputs["labels"], -100)
loss = model.train()(**inputs).loss
loss.backward()
assert loss == 0 and not full(model.lm_head.weight.grad).any()
""",
        processes=2,
    )


@pytest.mark.thorough
def test_four_ranks():
    on_ranks(
        """
equal_one_process("llama", dict(tp_size=4), vocab_size=61)
equal_one_process("llama", dict(fsdp_size=2, tp_size=2), vocab_size=61)
equal_one_process("llama", dict(fsdp_size=2, tp_size=2), {"num_items_in_batch": ITEMS}, tie_word_embeddings=True)
equal_one_process("gemma2", dict(fsdp_size=2, tp_size=2), final_logit_softcapping=2.0)

# Fewer words than ranks: the last has none, and takes part in what the others exchange.
from torch.distributed.tensor import Shard, distribute_tensor
from veomni_ops.cross_entropy_loss import causal
from veomni_transformers.forwards.vocabulary_shard import VocabularyShard
mesh = torch.distributed.init_device_mesh("cpu", (world,))
torch.manual_seed(0)
hidden, whole, bias = torch.randn(5, 8, requires_grad=True), torch.randn(3, 8), torch.randn(3)
weight, biases = (distribute_tensor(each, mesh, [Shard(0)]).requires_grad_() for each in (whole, bias))
labels = torch.tensor([0, 1, 2, -100, 1])
rest = dict(ignore_index=-100, num_items_in_batch=None, softcap=None, scale=None)
loss = VocabularyShard.of(weight).loss(kernel, hidden, weight.to_local(), labels, biases.to_local(), **rest)
found = torch.autograd.grad(loss, (hidden, weight, biases))
leaves = hidden.detach().requires_grad_(), whole.requires_grad_(), bias.requires_grad_()
wanted = torch.autograd.grad(causal(*leaves[:2], labels, leaves[2]), leaves)
assert (weight.to_local().shape[0] == 0) == (rank == 3)
for mine, theirs in zip(found, wanted):
    torch.testing.assert_close(full(mine), theirs)
""",
        processes=4,
    )


def test_a_head_that_is_not_sharded_by_words_has_no_variant():
    head = nn.Linear(4, 8)
    why_not = "the output projection has no forward that transformers' tensor parallelism put there"
    assert why_not_sharded_by_words(head) == why_not
    head.forward = lambda input: torch.zeros(8)
    assert why_not_sharded_by_words(head) == why_not
    model = build("llama")
    site = Site("cross_entropy_loss", "", "causal losses", "vocabulary_parallel", "")
    with pytest.raises(BindingError, match="the plan is for an output projection whose words are divided, but here"):
        list(CausalLosses().install(model, site, lambda *call: None, None))
