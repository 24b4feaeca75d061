"""DDP, FSDP2 and FSDP1 on two processes, with every kind of model: the gradients of one process, unbound."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import run_ranks
from training_setups import FAMILIES

_COMMON = f"""
    import functools, sys, warnings
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from training_setups import AUTO, assert_equal_steps, build, step, tokens
    from veomni_core import bind, binding_of
    from veomni_core.errors import LogitsGoneError

    rank = torch.distributed.get_rank()
    torch.manual_seed(0)

    def built(family):
        # Without dropout: each rank would drop other values than one process does.
        return build(family, dropout=False)

    @functools.cache
    def wanted(family):
        model = built(family).train()
        for seed in range(2):
            ids = tokens(seed=seed)
            (model(input_ids=ids, labels=ids).loss / 2).backward()
        return {{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}

    def compare(found, wanted):
        largest = max(float(gradient.norm()) for gradient in wanted.values())
        for name, gradient in wanted.items():
            allowed = 1e-4 * max(float(gradient.norm()), 1e-3 * largest)
            assert float((found[name] - gradient).norm()) <= allowed, name
        return len(wanted)
"""

_DDP = """
    from torch.nn.parallel import DistributedDataParallel

    for family in {families!r}:
        model = built(family)
        bind(model, AUTO)
        parallel = DistributedDataParallel(model, find_unused_parameters=True).train()
        ids = tokens(seed=rank)
        parallel(input_ids=ids, labels=ids).loss.backward()
        gradients = {{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
        print(family, compare(gradients, wanted(family)))
"""

_FSDP2 = """
    from torch.distributed.fsdp import fully_shard

    def layers(model):
        return [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "T5Block", "BertLayer"))]

    for family in {families!r}:
        eager = built(family).train()
        for when, reshard in (("before", None), ("after", None), ("after", True)):
            model = built(family)
            if when == "before":
                bind(model, AUTO)
            for layer in layers(model):
                fully_shard(layer)
            fully_shard(model, **({{}} if reshard is None else {{"reshard_after_forward": reshard}}))
            if when == "after":
                bind(model, AUTO)
            ids = tokens(seed=rank)
            logits = eager(input_ids=ids, labels=ids).logits
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*did not run forward before backward.*")
                output = model.train()(input_ids=ids, labels=ids)
                for moment in ("before backward", "after backward"):
                    try:
                        torch.testing.assert_close(output.logits.detach() + 0, logits, rtol=1e-4, atol=1e-5)
                    except LogitsGoneError as gone:
                        assert reshard and "was sharded again since" in str(gone)
                    if moment == "before backward":
                        output.loss.backward()
            gradients = {{n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}}
            print(family, when, reshard, compare(gradients, wanted(family)))
            binding_of(model).undo()
"""

_GROUPED = """
    from torch.distributed.fsdp import fully_shard

    # As transformers does: the last norm and the output projection are one group of parameters.
    model = build("qwen3")
    bind(model, AUTO)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard([model.model.norm, model.lm_head])
    fully_shard(model)
    ids = tokens(seed=rank)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*did not run forward before backward.*")
        model.train()(input_ids=ids, labels=ids).loss.backward()
    gradients = {{n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}}
    print("grouped", compare(gradients, wanted("qwen3")))
"""

_FSDP1 = """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def kinds(model):
        names = ("DecoderLayer", "T5Block", "BertLayer")
        return {{type(m) for m in model.modules() if type(m).__name__.endswith(names)}}

    for family in {families!r}:
        for original in (True, False):
            for when in ("before", "after"):
                model, outcomes = built(family), []
                if when == "before":
                    bind(model, AUTO)
                sharded = FullyShardedDataParallel(
                    model,
                    auto_wrap_policy=ModuleWrapPolicy(kinds(model)),
                    use_orig_params=original,
                    device_id=torch.device("cpu"),
                )
                if when == "after":
                    bind(sharded, AUTO)
                ids = tokens(seed=rank)
                found = sharded.train()(input_ids=ids, labels=ids).loss
                found.backward()
                eager = built(family).train()(input_ids=ids, labels=ids).loss
                torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)
                with FullyShardedDataParallel.summon_full_params(sharded, with_grads=original):
                    if original:
                        clean = lambda name: name.replace("_fsdp_wrapped_module.", "")
                        named = sharded.named_parameters()
                        gradients = {{clean(n): p.grad for n, p in named if p.grad is not None}}
                        compare(gradients, wanted(family))
                print(family, original, when)
"""


_SCRIPTS = {
    "DDP": (_DDP, 5),
    "FSDP2": (_FSDP2, 15),
    "FSDP2, norm and head in one group": (_GROUPED, 1),
    "FSDP1": (_FSDP1, 20),
}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("body, lines", _SCRIPTS.values(), ids=_SCRIPTS)
def test_ranks_get_the_gradients_of_one_process(body, lines):
    for output in run_ranks(_COMMON + body.format(families=FAMILIES)):
        assert len(output.splitlines()) == lines
