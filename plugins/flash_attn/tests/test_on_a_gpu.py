"""The libraries themselves, on a GPU: the contract, whole graphs, no wait for the device, and real models."""

from __future__ import annotations

import functools

import pytest
import torch
from flash_plugin import SPECS, heads, registry

from models import build, step, tokens
from veomni_conformance import check_kernel
from veomni_core import Hardware, bind
from veomni_ops.attention import AttentionModule, standard

pytestmark = pytest.mark.gpu
KERNELS = [(name, dtype) for name, spec in SPECS.items() for dtype in spec.dtypes]


def usable(name):
    """The kernel, or a skip with what it lacks here."""
    if unmet := SPECS[name].hardware.unmet(Hardware.detect()):
        pytest.skip("; ".join(unmet))
    return SPECS[name].load()


def on_gpu(inputs):
    return [each.detach().cuda().requires_grad_() for each in inputs]


def close(found, wanted, bound=2e-2):
    assert (found.float() - wanted.float()).norm() <= bound * wanted.float().norm()


def as_in_float64(kernel, module, inputs, **options):
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, _ = kernel(module, *inputs, None, **options)
    wanted, _ = standard(module, *exact, None, **options)
    close(found, wanted, 1e-2)
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, inputs, upstream)
    for mine, theirs in zip(gradients, torch.autograd.grad(wanted, exact, upstream.double()), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize(("name", "dtype"), KERNELS)
def test_the_contract(name, dtype):
    usable(name)
    check_kernel(SPECS[name], "cuda", dtype).raise_if_failed()


def test_one_process_may_use_several_softcaps():
    for softcap in (5.0, 2.0, 3.0):
        inputs = on_gpu(heads(length=150))
        as_in_float64(usable("flex_attention"), AttentionModule(2), inputs, softcap=softcap)


@pytest.mark.parametrize("name", SPECS)
def test_a_graph_does_not_break_and_has_the_same_gradients(name):
    kernel = usable(name)
    bounds = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
    for options in ({}, {"sliding_window": 64}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}):

        def call(q, k, v, kernel=kernel, options=options):
            return kernel(AttentionModule(2), q, k, v, None, **options)[0]

        inputs = on_gpu(heads(length=256, width=64))
        results = [call(*inputs), torch.compile(call, fullgraph=True)(*inputs)]
        close(*results, 5e-3)
        gradients = [torch.autograd.grad(result.float().square().sum(), inputs) for result in results]
        for eager, compiled in zip(*gradients, strict=True):
            close(compiled, eager, 2e-2)


# PyTorch 2.11 can't compile create_block_mask for as many keys as queries where their number is dynamic (CantSplit).
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_one_graph_serves_all_lengths(name):
    kernel = usable(name)

    @functools.partial(torch.compile, fullgraph=True, dynamic=True)
    def call(q, k, v, window, bounds):
        packing = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        return kernel(AttentionModule(2), q, k, v, None, sliding_window=window, **packing)[0]

    for length in (256, 300, 513):
        bounds = torch.tensor([0, 100, length], dtype=torch.int32, device="cuda")
        for window, packed in ((None, None), (64, None), (None, bounds)):
            inputs = on_gpu(heads(length=length, width=64))
            options = {"sliding_window": window, "cu_seq_lens_q": packed, "cu_seq_lens_k": packed}
            found, wanted = call(*inputs, window, packed), kernel(AttentionModule(2), *inputs, None, **options)[0]
            close(found, wanted, 5e-3)
            gradients = [torch.autograd.grad(result.float().square().sum(), inputs) for result in (found, wanted)]
            for mine, theirs in zip(*gradients, strict=True):
                close(mine, theirs, 2e-2)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_bounds_that_are_given_make_nothing_wait_for_the_gpu(name):
    kernel = usable(name)
    bounds = torch.tensor([0, 100, 101, 256], dtype=torch.int32, device="cuda")
    inputs = on_gpu(heads(length=256, width=64))
    options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": bounds.diff().max()}
    kernel(AttentionModule(2), *inputs, None, **options)[0].sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(AttentionModule(2), *inputs, None, **options)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(2, 1024, 32, 8, 128), (1, 777, 16, 16, 64), (1, 512, 8, 1, 256)], ids=str)
def test_real_shapes(name, shape):
    kernel = usable(name)
    batch, length, q_heads, k_heads, width = shape
    inputs = on_gpu(heads(batch, length, q_heads, k_heads, width))
    for options in ({}, {"sliding_window": 200}):
        as_in_float64(kernel, AttentionModule(q_heads // k_heads), inputs, **options)


@pytest.mark.parametrize("name", SPECS)
def test_the_widths_of_latent_attention(name):
    kernel = usable(name)
    query, key, _ = on_gpu(heads(2, 512, 8, 8, 192))
    *_, value = on_gpu(heads(2, 512, 8, 8, 128))
    as_in_float64(kernel, AttentionModule(1), (query, key, value))


def test_dropout_drops_weights_and_keeps_their_mean():
    kernel = usable("flash_attention_2")
    inputs = on_gpu(heads(2, 128, width=64))
    runs = torch.stack([kernel(AttentionModule(2), *inputs, None, dropout=0.5)[0].float() for _ in range(64)])
    assert not torch.equal(runs[0], runs[1])
    whole, _ = kernel(AttentionModule(2), *inputs, None)
    close(runs.mean(0), whole, 0.2)  # one run is off by its own norm, 64 by an eighth; without rescaling by a half


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_a_model_trains_on_it_as_on_sdpa(name, family):
    usable(name)
    ids = tokens(2, 64).cuda()
    config = {"hidden_size": 128, "head_dim": 32}
    models = [build(family, dtype=torch.bfloat16, attn_implementation="sdpa", **config).cuda() for _ in range(2)]
    wanted, wanted_gradients = step(models[0], ids)
    bind(models[1], {"preset": "eager", "attn_implementation": name}, registry=registry())
    found, gradients = step(models[1], ids)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    whole, exact = (torch.cat([each.flatten().float() for each in g.values()]) for g in (gradients, wanted_gradients))
    close(whole, exact, 5e-2)
