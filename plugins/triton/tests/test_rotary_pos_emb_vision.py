"""The rotation of vision towers against its contract, against the references bit for bit, and in a real tower."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from kernels_anywhere import registry
from veomni_conformance import check_kernel
from veomni_core import bind
from veomni_ops import rotary_pos_emb_vision as reference
from veomni_ops.contract import Size
from veomni_triton import plugin
from veomni_triton import rotary_pos_emb_vision as kernels
from veomni_triton.rotary_pos_emb_vision.launch import Launch, rotate_patches

SPECS = [spec for spec in plugin.veomni_kernels() if spec.op_name == "rotary_pos_emb_vision"]
VARIANTS = [spec.variant for spec in SPECS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other. The variants share a kernel: the pairs that are neighbours
# are checked there in every dtype, and so are the dimensions that are in no pair.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}
CASES = [
    pytest.param(spec, dtype, id=f"{spec}-{dtype}")
    for spec in SPECS
    for dtype in (spec.dtypes if DEVICE == "cuda" or spec.variant != "full" else ["bfloat16"])
]


@pytest.mark.thorough(one_per=["spec"])
@pytest.mark.parametrize("spec, dtype", CASES)
def test_conformance(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


def _heads(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def _angles(*shape, dtype=torch.float32):
    """Not cosines and sines of anything: each entry is drawn, so that none can be read in place of another."""
    return [torch.randn(*shape, device=DEVICE).to(dtype) for _ in range(2)]


def _with_gradients(function, q, k, *angles):
    """Values and gradients, for an upstream that two functions share."""
    results = function(q, k, *angles)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(result.shape, generator=generator).to(result) for result in results]
    return *results, *torch.autograd.grad(results, (q, k), upstream)


def _assert_equals_reference(variant, q, k, *angles):
    """Values and gradients, bit for bit."""
    found, wanted = (_with_gradients(getattr(module, variant), q, k, *angles) for module in (kernels, reference))
    _assert_same_bits(found, wanted)


def _assert_same_bits(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("angle_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_as_the_reference(variant, dtype, angle_dtype):
    q, k = _heads(7, 3, 40, dtype=dtype), _heads(7, 2, 40, dtype=dtype)
    _assert_equals_reference(variant, q, k, *_angles(7, 24 if variant == "partial" else 40, dtype=angle_dtype))


@given(
    variant=st.sampled_from(VARIANTS),
    leading=st.lists(st.integers(0, 2), max_size=2),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    patches=st.integers(0, 9),
    half=st.integers(1, 12),
    rest=st.integers(1, 5),
    angles_of=st.sampled_from(["each", "all", "all, as one"]),
)
@settings(deadline=None, max_examples=60)
def test_any_shape(variant, leading, heads, patches, half, rest, angles_of):
    width = 2 * half + (rest if variant == "partial" else 0)
    q, k = (_heads(*leading, patches, count, width) for count in heads)
    before = {"each": leading, "all": [], "all, as one": [1] * len(leading)}[angles_of]
    _assert_equals_reference(variant, q, k, *_angles(*before, patches, 2 * half))


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_cut_out_of_one_projection(variant):
    """As towers have them: views of one tensor ``[S, 3, H, D]``."""
    q, k, _ = torch.randn(5, 3, 4, 24, device=DEVICE).unbind(1)
    angles = _angles(5, 16 if variant == "partial" else 24)
    _assert_equals_reference(variant, q.requires_grad_(), k.requires_grad_(), *angles)
    assert all(x.is_contiguous() for x in getattr(kernels, variant)(q, k, *angles))


@pytest.mark.parametrize("variant", VARIANTS)
def test_strided_dimensions_and_transposed_leading_ones(variant):
    q, k = (torch.randn(3, 2, 5, heads, 32, device=DEVICE)[..., ::2].transpose(0, 1) for heads in (2, 1))
    rotated = 12 if variant == "partial" else 16
    cos, sin = (x.transpose(0, 1)[..., ::2] for x in _angles(3, 2, 5, 2 * rotated))
    _assert_equals_reference(variant, q.requires_grad_(), k.requires_grad_(), cos, sin)


def test_keys_of_another_dtype_keep_it():
    q, k = _heads(5, 2, 16, dtype=torch.bfloat16), _heads(5, 2, 16)
    _assert_equals_reference("full", q, k, *_angles(5, 16, dtype=torch.bfloat16))


def test_an_expanded_upstream_gradient():
    q, k, angles = _heads(5, 2, 16), _heads(5, 2, 16), _angles(5, 16)
    found, wanted = (
        torch.autograd.grad([x.sum() for x in module.pairwise(q, k, *angles)], (q, k))
        for module in (kernels, reference)
    )
    _assert_same_bits(found, wanted)


@pytest.mark.parametrize("launch", [Launch(1, 1), Launch(16, 4), Launch(64, 8)])
def test_the_launch_decides_no_bit(launch):
    q, k, angles = _heads(5, 3, 8), _heads(5, 1, 8), _angles(5, 8)
    _assert_same_bits(rotate_patches(q, k, *angles, False, False, launch), reference.full(q, k, *angles))


@pytest.mark.thorough(one_per=["variant"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_without_a_graph_break(variant, backend):
    torch._dynamo.reset()
    arguments = (_heads(2, 3, 2, 8), _heads(2, 3, 2, 8), *_angles(3, 6 if variant == "partial" else 8))
    kernel = getattr(kernels, variant)
    compiled = torch.compile(kernel, backend=backend, fullgraph=True)
    _assert_same_bits(_with_gradients(compiled, *arguments), _with_gradients(kernel, *arguments))


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_angles_are_saved(variant):
    saved = []
    q, k, angles = _heads(3, 2, 8), _heads(3, 2, 8), _angles(3, 6 if variant == "partial" else 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda _: None):
        getattr(kernels, variant)(q, k, *angles)
    assert saved == [x.data_ptr() for x in angles]


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_op_keeps_pytorchs_rules(neighbours, transposed):
    heads, angles = (_heads(2, 3, 2, 8).detach(), _heads(2, 3, 1, 8).detach()), _angles(3, 8 if neighbours else 6)
    arguments = (*heads, *angles, neighbours, transposed)
    torch.library.opcheck(torch.ops.veomni_triton.rotary_pos_emb_vision.default, arguments)


def test_what_cannot_be_rotated_is_refused():
    q, k = _heads(2, 3, 2, 8), _heads(2, 3, 1, 8)
    with pytest.raises(ValueError, match="cos is for 4 of a head's 8 dimensions"):
        kernels.full(q, k, *_angles(3, 4))
    with pytest.raises(ValueError, match="cos and sin are for 12 and 12 dimensions"):
        kernels.partial(q, k, *_angles(3, 12))
    with pytest.raises(ValueError, match="neighbours are rotated in whole heads only, not in 6 of 8 dimensions"):
        torch.ops.veomni_triton.rotary_pos_emb_vision(q, k, *_angles(3, 6), True, False)
    with pytest.raises(ValueError, match=r"cos is for \[5\], but q has \[2, 3\] patches: expected as many, or 3"):
        kernels.full(q, k, *_angles(5, 8))
    with pytest.raises(ValueError, match=r"cos is for \[3, 3\]"):
        kernels.full(q, k, *_angles(3, 3, 8))
    with pytest.raises(ValueError, match=r"cos is for \[1, 1, 3\]"):  # PyTorch would give results of more dimensions
        kernels.full(q, k, *_angles(1, 1, 3, 8))
    with pytest.raises(ValueError, match=r"k is \[2, 4, 1, 8\], but q \[2, 3, 2, 8\]"):
        kernels.full(q, _heads(2, 4, 1, 8), *_angles(3, 8))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("setting", ["plain", "autocast", "checkpointing", "LoRA"])
def test_a_step_of_a_vision_tower_is_as_eager(setting):
    config = Qwen2VLVisionConfig(depth=2, embed_dim=48, num_heads=2, hidden_size=32, mlp_ratio=2)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    tower = Qwen2VisionTransformerPretrainedModel(config).train().to(DEVICE)
    if setting == "checkpointing":
        tower.gradient_checkpointing_enable()
    if setting == "LoRA":
        tower = get_peft_model(tower, LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False))
    autocast = "bfloat16" if setting == "autocast" else None
    patches = torch.randn(24, 3 * 2 * 14 * 14, device=DEVICE)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]], device=DEVICE)  # two images in one call

    def step():
        tower.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast is not None):
            result = tower(patches, grid_thw=grid)
        result = result if isinstance(result, torch.Tensor) else result[0]
        result.float().square().mean().backward()
        trained = {name: each.grad for name, each in tower.named_parameters() if each.grad is not None}
        return result.detach(), trained

    wanted = step()
    fields = {"preset": "eager", "rotary_pos_emb_vision_implementation": "triton"}
    with bind(tower, fields, registry=registry(plugin, anywhere=True), autocast=autocast) as binding:
        found = step()
        assert [str(planned.spec) for planned in binding.plan.kernels] == ["rotary_pos_emb_vision/full:triton"]
    assert wanted[1]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_runs_give_the_same_bits_and_none_waits_for_the_gpu(dtype):
    q, k = _heads(777, 16, 80, dtype=dtype), _heads(777, 16, 80, dtype=dtype)
    angles = _angles(777, 80)
    upstream = [torch.randn_like(x) for x in (q, k)]

    def run():
        results = kernels.full(q, k, *angles)
        return *results, *torch.autograd.grad(results, (q, k), upstream)

    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [run() for _ in range(19)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
