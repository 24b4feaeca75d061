"""What the contracts can't ask of the kernels: compilation, what is written and saved, mixed dtypes, refusals."""

from __future__ import annotations

import pytest
import torch
from small_inputs import DEVICE, labels_of, leaf

from veomni_liger import cross_entropy_loss, moe_experts, rms_norm, rotary_pos_emb, swiglu_mlp
from veomni_liger.functions import first_derivative_of
from veomni_ops import rms_norm as norm_reference
from veomni_ops import swiglu_mlp as mlp_reference


def _rotated(rotation, width):
    angles = torch.linspace(0, 1, 5 * width, device=DEVICE).view(1, 5, width)
    return lambda q, k: torch.cat(rotation(q, k, angles.cos(), angles.sin()), dim=1)


NORMS = {
    "rms_norm standard": (lambda x, w: rms_norm.standard(x, w, 1e-6), [(3, 5, 16), (16,)]),
    "rms_norm cast_after": (lambda x, w: rms_norm.cast_after(x, w, 1e-6), [(3, 5, 16), (16,)]),
    "rms_norm offset": (lambda x, w: rms_norm.offset(x, w, 1e-6), [(3, 5, 16), (16,)]),
    "rms_norm unweighted": (lambda x: rms_norm.unweighted(x, None, 1e-6), [(3, 5, 16)]),
}
OPERATORS = {
    "rotary_pos_emb full": (_rotated(rotary_pos_emb.full, 16), [(2, 4, 5, 16), (2, 2, 5, 16)]),
    "rotary_pos_emb partial": (_rotated(rotary_pos_emb.partial, 8), [(2, 4, 5, 16), (2, 2, 5, 16)]),
    "rotary_pos_emb half_width": (_rotated(rotary_pos_emb.half_width, 8), [(2, 4, 5, 16), (2, 2, 5, 16)]),
    "swiglu_mlp": (swiglu_mlp.standard, [(5, 16), (5, 16)]),
    "swiglu_mlp gelu_tanh": (swiglu_mlp.gelu_tanh, [(5, 16), (5, 16)]),
    "cross_entropy_loss causal": (
        lambda h, w, b: cross_entropy_loss.causal(h, w, labels_of(9, 11), b, softcap=4.0, scale=0.5),
        [(9, 8), (11, 8), (11,)],
    ),
    "cross_entropy_loss seq_cls": (lambda x: cross_entropy_loss.seq_cls(x, labels_of(5, 3)), [(5, 3)]),
}
EXPERTS = {
    "moe_experts": (
        lambda h, w, u, d: moe_experts.standard(h, torch.arange(14, device=DEVICE).view(7, 2) % 5, w, u, d),
        [(7, 16), (7, 2), (4, 32, 16), (4, 16, 16)],
    ),
}
# Dynamo reads the kernels of LigerRMSNormFunction itself, which it doesn't know in the interpreter.
COMPILED = [pytest.param(*call, id=name, marks=pytest.mark.gpu) for name, call in NORMS.items()]


COMPILED += [pytest.param(*call, id=name) for name, call in OPERATORS.items()]


CALLS = NORMS | OPERATORS | EXPERTS


def _gradients(function, arguments):
    result = function(*arguments)
    return (result, *torch.autograd.grad(result, arguments, torch.full_like(result, 3.0)))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("function, shapes", COMPILED)
def test_compiles_without_a_graph_break(function, shapes):
    torch._dynamo.reset()
    torch.manual_seed(0)
    arguments = [leaf(*shape) for shape in shapes]
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for mine, theirs in zip(_gradients(compiled, arguments), _gradients(function, arguments), strict=True):
        torch.testing.assert_close(mine, theirs)


class _Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.saved_tensors[0].exp()


def test_a_function_made_to_refuse_second_derivatives_still_compiles_without_a_graph_break():
    torch._dynamo.reset()
    apply, x = first_derivative_of(_Exponential).apply, torch.randn(5, requires_grad=True)
    result = torch.compile(lambda x: apply(x), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x), (x.exp(),))
    with pytest.raises(RuntimeError, match="computes no second derivatives"):
        torch.autograd.grad(apply(x).sum(), x, create_graph=True)


def test_the_experts_break_the_graph_and_run_all_the_same():
    torch._dynamo.reset()
    torch.manual_seed(0)
    function, shapes = EXPERTS["moe_experts"]
    arguments = [leaf(*shape, dtype=torch.bfloat16) for shape in shapes]
    with pytest.raises(Exception, match="number of its tiles on the host"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments)
    found = torch.compile(function, backend="aot_eager")(*arguments)
    assert torch.equal(found, function(*arguments))


@pytest.mark.parametrize("function, shapes", [pytest.param(*call, id=name) for name, call in CALLS.items()])
def test_nothing_is_written_and_a_second_backward_gives_the_same(function, shapes):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if function is EXPERTS["moe_experts"][0] else torch.float32
    arguments = [leaf(*shape, dtype=dtype) for shape in shapes]
    before = [argument.detach().clone() for argument in arguments]
    result = function(*arguments)
    upstream = torch.randn_like(result)
    sent = upstream.clone()
    first = torch.autograd.grad(result, arguments, upstream, retain_graph=True)
    second = torch.autograd.grad(result, arguments, upstream)
    assert torch.equal(upstream, sent)
    assert all(torch.equal(argument, old) for argument, old in zip(arguments, before, strict=True))
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)  # the experts' router sums by atomics


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("variant", ["standard", "cast_after", "offset"])
def test_a_norm_whose_weight_has_another_dtype_gives_the_references_dtype(variant, dtypes):
    torch.manual_seed(0)
    x, weight = leaf(6, 64, dtype=dtypes[0]), leaf(64, dtype=dtypes[1])
    found, wanted = (getattr(norms, variant)(x, weight, 1e-6) for norms in (rms_norm, norm_reference))
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    for gradient, argument in zip(torch.autograd.grad(found.sum(), (x, weight)), (x, weight), strict=True):
        assert gradient.dtype == argument.dtype


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("variant", ["standard", "gelu_tanh"])
def test_a_gated_activation_of_two_dtypes_is_promoted_as_in_eager_code(variant, dtypes):
    torch.manual_seed(0)
    gate, up = (leaf(6, 64, dtype=dtype) for dtype in dtypes)
    found, wanted = (getattr(code, variant)(gate, up) for code in (swiglu_mlp, mlp_reference))
    assert found.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)  # eager code rounds a narrow gate's activation
    pairs = (torch.autograd.grad(result.sum(), (gate, up)) for result in (found, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_angles_of_the_wrong_width_and_other_layouts_are_refused():
    q, k, angles = leaf(1, 2, 3, 8), leaf(1, 1, 3, 8), torch.ones(1, 3, 6, device=DEVICE)
    with pytest.raises(ValueError, match="cos is 6 wide, expected 8"):
        rotary_pos_emb.full(q, k, angles, angles)
    with pytest.raises(ValueError, match="cos is 6 wide, expected 4"):
        rotary_pos_emb.half_width(q, k, angles, angles)
    with pytest.raises(ValueError, match="unsqueeze_dim is 0"):
        rotary_pos_emb.partial(q, k, angles, angles, unsqueeze_dim=0)


def _saved_bytes(call):
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        result = call()
    del result
    return kept


def test_what_is_saved_for_backward():
    gate, up = leaf(64, 32), leaf(64, 32)
    assert _saved_bytes(lambda: swiglu_mlp.standard(gate, up)).keys() == {gate.data_ptr(), up.data_ptr()}
    x, weight = leaf(64, 32), leaf(32)
    saved = _saved_bytes(lambda: rms_norm.cast_after(x, weight, 1e-6))
    assert sum(t.nbytes for pointer, t in saved.items() if pointer not in (x.data_ptr(), weight.data_ptr())) == 64 * 4


@pytest.mark.gpu
def test_a_step_of_the_causal_loss_replays_as_a_cuda_graph():
    hidden, weight = leaf(300, 64, dtype=torch.bfloat16), leaf(1000, 64, dtype=torch.bfloat16)
    labels = torch.arange(300, device=DEVICE) % 1000

    def step():
        return torch.autograd.grad(cross_entropy_loss.causal(hidden, weight, labels), (hidden, weight))

    wanted = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["standard", "cast_after", "offset", "unweighted"])
def test_many_narrow_rows_take_liger_s_other_kernel_and_round_as_the_reference(variant):
    torch.manual_seed(0)
    x = leaf(40_000, 128, dtype=torch.bfloat16)
    weight = None if variant == "unweighted" else leaf(128, dtype=torch.bfloat16)
    found, wanted = (getattr(norms, variant)(x, weight, 1e-6) for norms in (rms_norm, norm_reference))
    assert (found != wanted).double().mean() <= norm_reference.ROUNDING["bfloat16"]
    upstream, arguments = torch.randn_like(found), [t for t in (x, weight) if t is not None]
    pairs = zip(*(torch.autograd.grad(y, arguments, upstream) for y in (found, wanted)), strict=True)
    for mine, theirs in pairs:
        assert (mine.double() - theirs.double()).norm() <= 1e-2 * theirs.double().norm()
