"""The adapters on the CPU, over stand-ins with the libraries' signatures; test_on_a_gpu.py runs the libraries."""

from __future__ import annotations

import functools
import importlib

import pytest
import stand_ins
import torch
from flash_plugin import NAMES, SPECS, heads, registry, without_gpu
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

from models import build, step, tokens
from veomni_conformance import check_kernel
from veomni_core import bind
from veomni_core.errors import VeOmniError
from veomni_ops.attention import CONTRACTS, AttentionModule, standard
from veomni_ops.attention_blocks import TORCH, Block

CPU = torch.device("cpu")
COMPUTED = {"padding_mask", "sliding_window", "packed", "softcap"}
OWN = {
    "flash_attention_2": {"softcap_by_lengths", "dropout"},
    "flash_attention_3": {"softcap_by_lengths"},
    "flash_attention_4": {"sinks"},
}


@pytest.fixture(params=NAMES)
def kernel(request):
    """The adapter of each library, bound to the stand-in for it."""
    with stand_ins.installed():
        module = importlib.import_module(f"veomni_flash_attn.{request.param}")
    return module.standard


@pytest.mark.thorough(one_per=["kernel"])
@without_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_adapter_computes_what_it_declares_and_refuses_the_rest(kernel, dtype, extent):
    name = kernel.__module__.rpartition(".")[2]
    report = check_kernel(SPECS[name], "cpu", dtype, **extent)
    report.raise_if_failed()
    refused = {case.sample for case in report.cases if case.sample.endswith("(refused)")}
    contract = CONTRACTS["standard"]
    draws = (contract.samples, *([] if extent else [contract.beyond_a_tile]))
    samples = [each for draw in draws for each in draw(CPU, getattr(torch, dtype))]
    samples = [each for each in samples if each.is_for(SPECS[name].features)]
    beyond = {each.name for each in samples if not {*each.needs} <= COMPUTED | OWN.get(name, set())}
    if name == "flash_attention_4":
        beyond |= {each.name for each in samples if 256 in each.sizes.get("head_dim", ())}
    assert refused == {f"{sample} (refused)" for sample in beyond | {"second derivatives"}}


@without_gpu
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize(
    "block", [Block(0.3), Block(0.3, 2.0, causal=True), Block(0.3, left=3), Block(0.3, 0.0, True, 3)]
)
def test_blocks_of_a_ring_are_passed_to_the_library(name, block):
    with stand_ins.installed():
        blocks = importlib.import_module(f"veomni_flash_attn.{name}").standard.blocks
    query, key, value = (each.transpose(1, 2) for each in heads(length=9))
    value = value[..., :8].clone()
    output, lse = blocks.attend(query, key, value, block)
    wanted = TORCH.attend(query, key, value, block)
    torch.testing.assert_close((output, lse), wanted)
    whole = (output, 0.5 * output, lse + 1)  # the output and the log-sum-exp are those of all blocks
    found = blocks.gradients(whole[0], query, key, value, *whole[1:], block)
    torch.testing.assert_close(found, TORCH.gradients(whole[0], query, key, value, *whole[1:], block))


@without_gpu
def test_positions_that_restart_pack_a_batch_of_one(kernel):
    inputs = heads(length=9)
    bounds = torch.tensor([0, 4, 9])
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    by_positions, _ = kernel(AttentionModule(2), *inputs, None, position_ids=positions)
    by_bounds, _ = kernel(AttentionModule(2), *inputs, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    assert torch.equal(by_positions, by_bounds)
    alone, _ = kernel(AttentionModule(2), *inputs, None, position_ids=torch.arange(9)[None])
    assert not torch.equal(alone[:, 4:], by_bounds[:, 4:])


@without_gpu
def test_positions_that_restart_pack_each_row_of_a_batch(kernel):
    inputs = heads(batch=2, length=9)
    positions = torch.stack([torch.cat([torch.arange(count), torch.arange(9 - count)]) for count in (4, 6)])
    together, _ = kernel(AttentionModule(2), *inputs, None, position_ids=positions)
    for row in range(2):
        here = [each[row : row + 1] for each in inputs]
        alone, _ = kernel(AttentionModule(2), *here, None, position_ids=positions[row : row + 1])
        assert torch.equal(together[row], alone[0])
    ends = torch.tensor([0, 4, 9, 15, 18], dtype=torch.int32)  # as a hybrid's layers get them
    by_ends, _ = kernel(AttentionModule(2), *inputs, None, cu_seqlens_of_rows=ends)
    assert torch.equal(by_ends, together)
    with pytest.raises(VeOmniError, match="a padding mask or packed sequences, not both"):
        kernel(AttentionModule(2), *inputs, torch.ones(2, 9, dtype=torch.long), cu_seqlens_of_rows=ends)


@without_gpu
def test_positions_that_jump_forward_are_one_sequence(kernel):
    inputs = heads(length=9)
    positions = torch.cat([torch.arange(4), torch.arange(20, 25)])[None]
    found, _ = kernel(AttentionModule(2), *inputs, None, position_ids=positions)
    assert torch.equal(found, kernel(AttentionModule(2), *inputs, None)[0])


@without_gpu
def test_keys_behind_the_mask_are_a_static_caches_and_not_read(kernel):
    query, key, value = heads(batch=2, length=9)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    found, _ = kernel(AttentionModule(2), query[:, :, 5:6], key, value, mask)
    for row, first in enumerate((0, 2)):
        here = [each[row : row + 1] for each in (query[:, :, 5:6], key[:, :, first:6], value[:, :, first:6])]
        alone, _ = kernel(AttentionModule(2), *here, None)
        torch.testing.assert_close(found[row], alone[0], rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="a padding mask of 10 positions for 9 queries and 9 keys"):
        kernel(AttentionModule(2), query, key, value, torch.ones(2, 10))


@without_gpu
@pytest.mark.parametrize("asked", ["position_bias", "indices", "block_indices", "sinks"])
def test_an_option_that_changes_the_result_is_refused(kernel, asked):
    with pytest.raises(ValueError, match=f"does not compute `{asked}`; choose eager"):
        kernel(AttentionModule(2), *heads(), None, **{asked: torch.zeros(1)})
    kernel(AttentionModule(2), *heads(), None, **{asked: None})


@without_gpu
def test_backward_fills_no_zeros_for_the_log_sum_exp(kernel):
    filled = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            filled.extend([function] if "zeros" in str(function) else [])
            return function(*args, **(kwargs or {}))

    output, _ = kernel(AttentionModule(2), *heads(), None)
    with Watch():
        output.backward(torch.ones_like(output))
    assert not filled


@without_gpu
@pytest.mark.parametrize("name", [*NAMES, "flex_attention"])
def test_transformers_takes_for_flash_attention_what_is_one(name):
    from transformers.utils.generic import is_flash_attention_requested

    with stand_ins.installed():
        importlib.import_module(f"veomni_flash_attn.{name}")
    model = build("llama", dtype=torch.bfloat16, head_dim=16)
    with bind(model, {"preset": "eager", "attn_implementation": name}, registry=registry(anywhere=True)):
        assert is_flash_attention_requested(model.config) == (name in NAMES)


@without_gpu
def test_left_padding_and_all_padding(kernel):
    inputs = heads(batch=3, length=7)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, :3] = 0
    mask[2] = 0
    found, _ = kernel(AttentionModule(2), *inputs, mask)
    assert not found[2].any() and not found[0, :3].any()
    wanted, _ = standard(AttentionModule(2), *(each[:1, :, 3:].float() for each in inputs), None)
    torch.testing.assert_close(found[0, 3:].float(), wanted[0], rtol=2e-2, atol=2e-2)
    found.float().square().sum().backward()
    assert all(not each.grad[2].any() and torch.isfinite(each.grad).all() for each in inputs)


@without_gpu
def test_what_a_library_can_not_compute_is_refused_with_what_it_was(kernel):
    module = AttentionModule(2)
    name = kernel.__module__.rpartition(".")[2]
    inputs = heads()
    with pytest.raises(
        ValueError, match="takes a padding mask .* not one of .1, 1, 12, 12.; .* sdpa or flex_attention"
    ):
        kernel(module, *inputs, torch.ones(1, 1, 12, 12))
    bounds = torch.tensor([0, 12])
    with pytest.raises(ValueError, match="need batch size 1, this batch has 2"):
        kernel(module, *heads(batch=2), None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(ValueError, match="heads of 264"):
        kernel(module, *heads(width=264), None)
    with pytest.raises(ValueError, match="need cu_seq_lens_q and cu_seq_lens_k; cu_seq_lens_k is missing"):
        kernel(module, *inputs, None, cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match=f"{name} takes a padding mask or packed sequences, not both"):
        kernel(module, *inputs, torch.ones(1, 12), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(ValueError, match="heads of 20"):
        kernel(module, *heads(width=20), None)
    with pytest.raises(ValueError, match=f"{name} does not compute float32"):
        kernel(module, *heads(dtype=torch.float32), None)
    if name != "flash_attention_2":
        with pytest.raises(ValueError, match=f"{name} does not compute dropout"):
            kernel(module, *inputs, None, dropout=0.1)
    if name == "flash_attention_4":
        with pytest.raises(ValueError, match="softcap over packed"):
            kernel(module, *inputs, None, softcap=2.0, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


@without_gpu
def test_under_autocast_float32_heads_take_its_dtype(kernel):
    inputs = heads(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = kernel(AttentionModule(2), *inputs, None)
        found.float().sum().backward()
    wanted, _ = kernel(AttentionModule(2), *(each.bfloat16() for each in inputs), None)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)  # the stand-in's own products take it too
    assert all(each.grad.dtype == torch.float32 for each in inputs)


@pytest.mark.thorough
@without_gpu
@pytest.mark.parametrize("name", ["flash_attention_3", "flash_attention_4"])
def test_a_model_trains_on_it_as_on_sdpa_and_its_graph_does_not_break(name):
    with stand_ins.installed():
        importlib.import_module(f"veomni_flash_attn.{name}")
    ids = tokens(2, 12)
    wanted, wanted_gradients = step(build("llama", dtype=torch.bfloat16, attn_implementation="sdpa"), ids)
    model = build("llama", dtype=torch.bfloat16)
    with bind(model, {"preset": "eager", "attn_implementation": name}, registry=registry(anywhere=True)):
        assert name in model.config._attn_implementation  # its masks are those of lengths, under a name on loan
        found, gradients = step(model, ids)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(loss, found, rtol=1e-2, atol=1e-2)
    for parameter, gradient in wanted_gradients.items():
        assert (gradients[parameter] - gradient).norm() <= 0.05 * gradient.norm(), parameter
    assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.thorough(one_per=[])
@without_gpu
@pytest.mark.parametrize("name", ["flash_attention_3", "flash_attention_4"])
def test_one_graph_serves_all_lengths(name):
    with stand_ins.installed():
        kernel = importlib.import_module(f"veomni_flash_attn.{name}").standard
    graphs, counts = CompileCounterWithBackend("aot_eager"), set()

    @functools.partial(torch.compile, fullgraph=True, dynamic=True, backend=graphs)
    def call(query, key, value, bounds):
        return kernel(AttentionModule(2), query, key, value, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)[0]

    for length in (9, 12, 15):
        inputs, bounds = heads(length=length), torch.tensor([0, 4, length])
        wanted, _ = kernel(AttentionModule(2), *inputs, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
        found = call(*inputs, bounds)
        assert torch.equal(found, wanted)
        upstream = torch.ones_like(wanted)
        gradients = zip(*(torch.autograd.grad(each, inputs, upstream) for each in (found, wanted)), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in gradients)
        counts.add(graphs.frame_count)
    assert len(counts) == 1


@without_gpu
@pytest.mark.parametrize("covered", [None, 6, 16], ids=["no mask", "a mask of the tokens", "a mask of all slots"])
def test_a_static_caches_unwritten_keys_are_seen_by_no_query(covered):
    with stand_ins.installed():
        importlib.import_module("veomni_flash_attn.flash_attention_2")
    own, model = (build("llama", dtype=torch.bfloat16, head_dim=16).eval() for _ in range(2))

    def logits(which):
        cache, parts = StaticCache(config=which.config, max_cache_len=16), []
        for part, end in zip(tokens(2, 9).split((6, 2, 1), dim=1), (6, 8, 9), strict=True):
            length = {None: None, 6: end, 16: 16}[covered]
            mask = None if length is None else (torch.arange(length) < end).long().expand(2, -1)
            with torch.no_grad():
                parts.append(which(part, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
        return torch.cat(parts, dim=1)

    wanted = logits(own)
    with bind(model, {"preset": "eager", "attn_implementation": "flash_attention_2"}, registry=registry(anywhere=True)):
        torch.testing.assert_close(logits(model), wanted, rtol=3e-2, atol=3e-2)


@without_gpu
def test_in_the_place_of_eager_attention_the_token_after_padding_has_its_loss():
    with stand_ins.installed():
        importlib.import_module("veomni_flash_attn.flash_attention_2")
    own, model = (build("llama", dtype=torch.bfloat16, head_dim=16, attn_implementation="eager") for _ in range(2))
    ids, mask = tokens(), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    with bind(model, {"preset": "eager", "attn_implementation": "flash_attention_2"}, registry=registry(anywhere=True)):
        found, wanted = (m(input_ids=ids, attention_mask=mask).logits for m in (model, own))
        assert len(model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions) == 2
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
