"""What the contracts can't ask of the kernels: compilation, memory, mixed dtypes, refusals, real shapes."""

from __future__ import annotations

import pytest
import torch

from veomni_core.ops import moe_experts as experts_reference
from veomni_core.ops import rms_norm as norm_reference
from veomni_core.ops import swiglu_mlp as mlp_reference
from veomni_liger import cross_entropy_loss, moe_experts, rms_norm, rotary_pos_emb, swiglu_mlp
from veomni_liger.functions import first_derivative_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def _labels(count, classes):
    labels = torch.arange(count, device=DEVICE) % classes
    labels[1] = -100
    return labels


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
        lambda h, w, b: cross_entropy_loss.causal(h, w, _labels(9, 11), b, softcap=4.0, scale=0.5),
        [(9, 8), (11, 8), (11,)],
    ),
    "cross_entropy_loss seq_cls": (lambda x: cross_entropy_loss.seq_cls(x, _labels(5, 3)), [(5, 3)]),
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


@pytest.mark.parametrize("function, shapes", COMPILED)
def test_compiles_without_a_graph_break(function, shapes):
    torch._dynamo.reset()
    torch.manual_seed(0)
    arguments = [_leaf(*shape) for shape in shapes]
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
    arguments = [_leaf(*shape, dtype=torch.bfloat16) for shape in shapes]
    with pytest.raises(Exception, match="number of its tiles on the host"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments)
    found = torch.compile(function, backend="aot_eager")(*arguments)
    assert torch.equal(found, function(*arguments))


@pytest.mark.parametrize("function, shapes", [pytest.param(*call, id=name) for name, call in CALLS.items()])
def test_nothing_is_written_and_a_second_backward_gives_the_same(function, shapes):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if function is EXPERTS["moe_experts"][0] else torch.float32
    arguments = [_leaf(*shape, dtype=dtype) for shape in shapes]
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


@pytest.mark.parametrize("label", [50, -1])
def test_a_label_beyond_the_vocabulary_is_refused(label):
    labels = torch.tensor([0, label, -100])
    with pytest.raises(RuntimeError, match=r"a label is neither in \[0, 11\) nor -100"):
        cross_entropy_loss.causal(_leaf(3, 8), _leaf(11, 8), labels)


def test_no_gradient_is_computed_where_none_is_recorded(monkeypatch):
    asked = []
    whole = cross_entropy_loss._linear_cross_entropy

    def watched(*args, **options):
        asked.append((options["compute_gradients"], options["weight_requires_grad"]))
        return whole(*args, **options)

    monkeypatch.setattr(cross_entropy_loss, "_linear_cross_entropy", watched)
    arguments = (_leaf(3, 8), _leaf(11, 8), _labels(3, 11))
    with torch.no_grad():
        quiet = cross_entropy_loss.causal(*arguments)
    assert torch.equal(quiet, cross_entropy_loss.causal(*arguments).detach())
    assert asked == [(False, False), (True, True)]


def test_a_classifier_without_rows_has_no_loss():
    logits = torch.randn(0, 5, requires_grad=True)
    loss = cross_entropy_loss.seq_cls(logits, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss == 0 and logits.grad.shape == (0, 5)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("variant", ["standard", "cast_after", "offset"])
def test_a_norm_whose_weight_has_another_dtype_gives_the_references_dtype(variant, dtypes):
    torch.manual_seed(0)
    x, weight = _leaf(6, 64, dtype=dtypes[0]), _leaf(64, dtype=dtypes[1])
    found, wanted = (getattr(norms, variant)(x, weight, 1e-6) for norms in (rms_norm, norm_reference))
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    for gradient, argument in zip(torch.autograd.grad(found.sum(), (x, weight)), (x, weight), strict=True):
        assert gradient.dtype == argument.dtype


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("variant", ["standard", "gelu_tanh"])
def test_a_gated_activation_of_two_dtypes_is_promoted_as_in_eager_code(variant, dtypes):
    torch.manual_seed(0)
    gate, up = (_leaf(6, 64, dtype=dtype) for dtype in dtypes)
    found, wanted = (getattr(code, variant)(gate, up) for code in (swiglu_mlp, mlp_reference))
    assert found.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)  # eager code rounds a narrow gate's activation
    pairs = (torch.autograd.grad(result.sum(), (gate, up)) for result in (found, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_a_frozen_backbone_leaves_the_heads_gradients():
    torch.manual_seed(0)
    hidden, weight, bias, labels = _leaf(9, 8), _leaf(11, 8), _leaf(11), _labels(9, 11)
    trained = cross_entropy_loss.causal(hidden, weight, labels, bias)
    frozen = cross_entropy_loss.causal(hidden.detach(), weight, labels, bias)
    pairs = zip(torch.autograd.grad(frozen, (weight, bias)), torch.autograd.grad(trained, (weight, bias)), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    evaluated = cross_entropy_loss.causal(hidden.detach(), weight.detach(), labels, bias.detach())
    torch.testing.assert_close(evaluated, trained.detach())


def test_no_tokens_cost_nothing_and_give_zero_gradients():
    hidden, weight = _leaf(0, 8), _leaf(11, 8)
    loss = cross_entropy_loss.causal(hidden, weight, torch.zeros(0, dtype=torch.long, device=DEVICE))
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0.0 and dhidden.shape == (0, 8) and not dweight.any()


def test_a_factor_of_the_loss_is_not_rounded_to_the_gradients_dtype():
    torch.manual_seed(0)
    hidden, weight = _leaf(40, 8), _leaf(11, 8)
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    labels = torch.arange(40, device=DEVICE) % 11
    (first,) = torch.autograd.grad(cross_entropy_loss.causal(*low, labels, num_items_in_batch=1), low[1])
    (second,) = torch.autograd.grad(cross_entropy_loss.causal(*low, labels, num_items_in_batch=8191), low[1])
    assert torch.equal(second, (first.double() / 8191).bfloat16())


def test_a_label_that_is_no_class_is_refused():
    with pytest.raises(AssertionError, match="out of bounds"):
        cross_entropy_loss.seq_cls(_leaf(2, 3), torch.tensor([0, 3], device=DEVICE))


def test_angles_of_the_wrong_width_and_other_layouts_are_refused():
    q, k, angles = _leaf(1, 2, 3, 8), _leaf(1, 1, 3, 8), torch.ones(1, 3, 6, device=DEVICE)
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
    gate, up = _leaf(64, 32), _leaf(64, 32)
    assert _saved_bytes(lambda: swiglu_mlp.standard(gate, up)).keys() == {gate.data_ptr(), up.data_ptr()}
    x, weight = _leaf(64, 32), _leaf(32)
    saved = _saved_bytes(lambda: rms_norm.cast_after(x, weight, 1e-6))
    assert sum(t.nbytes for pointer, t in saved.items() if pointer not in (x.data_ptr(), weight.data_ptr())) == 64 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["standard", "cast_after", "offset", "unweighted"])
def test_many_narrow_rows_take_liger_s_other_kernel_and_round_as_the_reference(variant):
    torch.manual_seed(0)
    x = _leaf(40_000, 128, dtype=torch.bfloat16)
    weight = None if variant == "unweighted" else _leaf(128, dtype=torch.bfloat16)
    found, wanted = (getattr(norms, variant)(x, weight, 1e-6) for norms in (rms_norm, norm_reference))
    assert (found != wanted).double().mean() <= norm_reference.ROUNDING["bfloat16"]
    upstream, arguments = torch.randn_like(found), [t for t in (x, weight) if t is not None]
    pairs = zip(*(torch.autograd.grad(y, arguments, upstream) for y in (found, wanted)), strict=True)
    for mine, theirs in pairs:
        assert (mine.double() - theirs.double()).norm() <= 1e-2 * theirs.double().norm()


@pytest.mark.gpu
def test_experts_of_a_real_shape_are_close_to_the_reference():
    torch.manual_seed(0)
    tokens, hidden, intermediate, experts, k = 4096, 2048, 768, 128, 8
    index = torch.rand(tokens, experts, device="cuda").topk(k).indices
    index[::7, 0] = experts  # dropped
    bf16 = {"dtype": torch.bfloat16}
    arguments = [
        _leaf(tokens, hidden, **bf16),
        torch.rand(tokens, k, device="cuda").bfloat16().requires_grad_(),
        (_leaf(experts, 2 * intermediate, hidden, **bf16) * hidden**-0.5).detach().requires_grad_(),
        (_leaf(experts, hidden, intermediate, **bf16) * intermediate**-0.5).detach().requires_grad_(),
    ]
    exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
    found = moe_experts.standard(arguments[0], index, *arguments[1:])
    wanted = experts_reference.standard(exact[0], index, *exact[1:])
    upstream = torch.randn_like(found)
    mine = (found, *torch.autograd.grad(found, arguments, upstream))
    theirs = (wanted, *torch.autograd.grad(wanted, exact, upstream.double()))
    for a, b in zip(mine, theirs, strict=True):
        assert (a.double() - b).norm() <= 1.5e-2 * b.norm()
    assert not mine[2][index == experts].any()


def test_what_a_dropped_route_is_sent_to_instead_adds_nothing_even_where_it_is_infinite():
    torch.manual_seed(0)
    experts, hidden, intermediate = 3, 16, 16
    half = {"dtype": torch.bfloat16, "device": DEVICE}
    index = torch.tensor([[3, 2], [1, 3], [3, 3], [2, 1]], device=DEVICE)  # expert 3 is none; nobody chose expert 0
    arguments = [
        torch.randn(4, hidden, **half),
        torch.rand(4, 2, **half),
        torch.randn(experts, 2 * intermediate, hidden, **half),
        torch.randn(experts, hidden, intermediate, **half),
    ]
    arguments[0][2] = torch.inf  # of the token whose routes are all dropped
    arguments[2][0], arguments[3][0] = torch.inf, -torch.inf
    for each in arguments:
        each.requires_grad_()
    results = []
    for function in (moe_experts.standard, experts_reference.standard):
        result = function(arguments[0], index, *arguments[1:])
        results.append((result, *torch.autograd.grad(result, arguments, torch.ones_like(result))))
    for found, wanted in zip(*results, strict=True):
        assert (found.double() - wanted.double()).norm() <= 2e-2 * wanted.double().norm()


def test_nothing_is_computed_where_all_routes_are_dropped():
    shapes = (5, 16), (5, 2), (3, 32, 16), (3, 16, 16)
    arguments = [torch.full(shape, torch.inf, dtype=torch.bfloat16, device=DEVICE).requires_grad_() for shape in shapes]
    found = moe_experts.standard(arguments[0], torch.full((5, 2), 3, device=DEVICE), *arguments[1:])
    for each in (found, *torch.autograd.grad(found.sum(), arguments)):
        assert each.eq(0).all()
