"""Faults that show between forward and backward, with frozen inputs, and from one step to the next."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import Counter

import pytest
import torch
from planted_faults import SwiGLU, assert_caught, derivatives, failures_of, right
from torch.autograd import Function
from torch.nn import functional as F

from veomni_ops import attention, causal_conv1d, rms_norm
from veomni_ops.contract import Size

_last, _workspace, _results, _gradients, _by_id, _by_address, _by_shape, _held = {}, {}, {}, {}, {}, {}, {}, []
_queue = []


class _FrozenUp(SwiGLU):
    """Reads off whether ``up`` wants a gradient for both."""

    @staticmethod
    def backward(ctx, upstream):
        dgate, dup = SwiGLU.backward(ctx, upstream)
        return (dgate, dup) if ctx.needs_input_grad[1] else (torch.zeros_like(dgate), None)


class _WrongPosition(SwiGLU):
    @staticmethod
    def backward(ctx, upstream):
        dgate, dup = SwiGLU.backward(ctx, upstream)
        return dgate if ctx.needs_input_grad[1] else None, dup if ctx.needs_input_grad[0] else None


class _Global(SwiGLU):
    """Its backward reads a module's global."""

    @staticmethod
    def forward(ctx, gate, up):
        _last["call"] = (gate.detach(), up.detach())
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, upstream):
        return derivatives(*_last["call"], upstream)


class _Queue(SwiGLU):
    """Its backwards must come in the order of its forwards."""

    @staticmethod
    def forward(ctx, gate, up):
        _queue.append((gate.detach(), up.detach()))
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, upstream):
        gate, up = next(pair for pair in _queue if pair[0].shape == upstream.shape)
        _queue[:] = [pair for pair in _queue if pair[0] is not gate]
        return derivatives(gate, up, upstream)


class _SharedWorkspace(SwiGLU):
    @staticmethod
    def forward(ctx, gate, up):
        buffer = _workspace.setdefault(gate.shape, torch.empty(2, *gate.shape))
        buffer[0], buffer[1] = gate, up
        ctx.buffer = buffer
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, upstream):
        return derivatives(*ctx.buffer, upstream)


class _OnContext(SwiGLU):
    """Autograd can't see that what it keeps is written in place."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.inputs = gate.detach(), up.detach()
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, upstream):
        return derivatives(*ctx.inputs, upstream)


class _OwnResult(Function):
    """Takes the gradient of ``up`` from its result, which the next layer may write over."""

    @staticmethod
    def forward(ctx, gate, up):
        result = F.silu(gate) * up
        ctx.save_for_backward(gate, up)
        ctx.result = result.detach()
        return result

    @staticmethod
    def backward(ctx, upstream):
        gate, up = ctx.saved_tensors
        return derivatives(gate, up, upstream)[0], upstream * ctx.result / up


class _ReusedGradients(SwiGLU):
    @staticmethod
    def backward(ctx, upstream):
        found = SwiGLU.backward(ctx, upstream)
        kept = _gradients.setdefault(found[0].shape, tuple(torch.empty_like(each) for each in found))
        return tuple(buffer.copy_(each) for buffer, each in zip(kept, found, strict=True))


class _Frees(SwiGLU):
    """Writes over what it saved, so that a second backward reads something else."""

    @staticmethod
    def backward(ctx, upstream):
        gate, up = ctx.saved_tensors
        found = derivatives(gate, up, upstream)
        ctx.scale = getattr(ctx, "scale", 0) + 1
        return found if ctx.scale == 1 else tuple(each * 0 for each in found)


class _WritesGrad(Function):
    """Adds to ``weight.grad`` itself and returns the gradient too."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.weight = eps, weight
        return rms_norm.offset(x, weight, eps)

    @staticmethod
    def backward(ctx, upstream):
        with torch.enable_grad():
            x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            dx, dweight = torch.autograd.grad(rms_norm.offset(x, weight, ctx.eps), (x, weight), upstream)
        if ctx.weight.grad is not None:
            ctx.weight.grad += dweight
        return dx, dweight, None


class _SpoilsWhatItSaved(SwiGLU):
    @staticmethod
    def backward(ctx, upstream):
        found = SwiGLU.backward(ctx, upstream)
        ctx.saved_tensors[0].data.zero_()
        return found


def frozen_up_stops_gate(gate, up):
    return _FrozenUp.apply(gate, up)


def asks_for_the_wrong_input(gate, up):
    return _WrongPosition.apply(gate, up)


def raises_if_an_input_is_frozen(gate, up):
    if torch.is_grad_enabled() and not (gate.requires_grad and up.requires_grad):
        raise AssertionError("expected gradients")
    return right(gate, up)


def backward_reads_a_global(gate, up):
    return _Global.apply(gate, up)


def backward_in_the_order_of_forward(gate, up):
    return _Queue.apply(gate, up)


def shares_a_workspace(gate, up):
    if torch.is_inference_mode_enabled():
        return right(gate, up)
    return _SharedWorkspace.apply(gate, up)


def keeps_inputs_unseen(gate, up):
    return _OnContext.apply(gate, up)


def keeps_its_result_unseen(gate, up):
    return _OwnResult.apply(gate, up)


def gives_the_same_buffer_to_validation(gate, up):
    result = right(gate, up)
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return result
    return _results.setdefault(result.shape, torch.empty_like(result)).copy_(result)


def gives_the_same_gradient_buffers(gate, up):
    return _ReusedGradients.apply(gate, up)


def second_backward_gives_zeros(gate, up):
    return _Frees.apply(gate, up)


def writes_the_weights_grad(x, weight, eps):
    return _WritesGrad.apply(x, weight, eps)


def backward_spoils_what_was_saved(gate, up):
    return _SpoilsWhatItSaved.apply(gate, up)


def _scaled(weight, cache, key):
    if key not in cache:
        cache[key] = 1.0 + weight.detach().clone()
    return cache[key] - 1.0 + (weight - weight.detach())


def cached_by_identity(x, weight, eps):
    return rms_norm.offset(x, _scaled(weight, _by_id, id(weight)), eps)


def cached_by_address_and_version(x, weight, eps):
    key = (weight.data_ptr(), weight._version, weight.shape)
    return rms_norm.offset(x, _scaled(weight, _by_address, key), eps)


def cached_by_shape(x, weight, eps):
    return rms_norm.offset(x, _scaled(weight, _by_shape, weight.shape), eps)


def cached_scales_without_a_weight(x, weight, eps):
    scale = torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + eps)
    if not x.requires_grad:
        scale = _by_address.setdefault((id(x), x.shape), scale)
        return (x * scale).to(x.dtype)
    return rms_norm.unweighted(x, None, eps)


def _kept_of(tensor):
    """The values that this tensor had when it was first given; its address may be another's later."""
    kept = _by_id.get(id(tensor))
    if kept is None or kept[0]() is not tensor:
        kept = _by_id[id(tensor)] = (weakref.ref(tensor), tensor.clone())
    return kept[1]


def boundaries_by_identity(x, weight, bias=None, activation=None, seq_idx=None):
    seq_idx = None if seq_idx is None else _kept_of(seq_idx)
    return causal_conv1d.standard(x, weight, bias, activation, seq_idx)


def padding_by_identity(module, query, key, value, attention_mask, **options):
    attention_mask = None if attention_mask is None else _kept_of(attention_mask)
    return attention.standard(module, query, key, value, attention_mask, **options)


_ring, _turns, _instances = {}, Counter(), {}


def _of_gate(ctx, upstream, replaced):
    """The gradients, of what ``replaced`` gives for the ``gate`` that was saved."""
    if torch.is_grad_enabled():
        raise RuntimeError("no second derivatives")
    gate, up = ctx.saved_tensors
    dgate, dup = derivatives(replaced(gate), up, upstream)
    return dgate.to(gate.dtype), dup.to(up.dtype)


class _Ring(SwiGLU):
    """Saves the activation in one of sixteen workspaces, which calls take in turn."""

    @staticmethod
    def forward(ctx, gate, up):
        key = (gate.shape, gate.dtype, threading.get_ident())
        with torch.inference_mode(False):
            spaces = _ring.setdefault(key, [torch.empty(gate.shape, dtype=gate.dtype) for _ in range(16)])
        _turns[key] += 1
        ctx.kept = spaces[_turns[key] % 16].copy_(gate)
        return SwiGLU.forward(ctx, gate, up)

    @staticmethod
    def backward(ctx, upstream):
        return _of_gate(ctx, upstream, lambda saved: ctx.kept if ctx.kept.shape == saved.shape else saved)


def saves_into_a_ring_of_workspaces(gate, up):
    return _Ring.apply(gate, up) if torch.is_grad_enabled() else right(gate, up)


class _Address(SwiGLU):
    """Its backward reads what lies where ``gate`` lay in forward, as by a descriptor that forward made."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.address = gate.data_ptr() if gate.is_contiguous() and gate.numel() else 0
        return SwiGLU.forward(ctx, gate, up)

    @staticmethod
    def backward(ctx, upstream):
        def lying_there(saved):
            if not ctx.address:
                return saved
            memory = (ctypes.c_byte * (saved.numel() * saved.element_size())).from_address(ctx.address)
            return torch.frombuffer(memory, dtype=saved.dtype).view(saved.shape).clone()

        return _of_gate(ctx, upstream, lying_there)


def keeps_an_address_for_backward(gate, up):
    return _Address.apply(gate, up)


def instances_by_shape_alone(gate, up):
    if gate.dtype != up.dtype:
        return right(gate, up)
    dtype = _instances.setdefault(gate.shape, gate.dtype)
    return right(gate.to(dtype), up.to(dtype)).to(gate.dtype)


def no_bias_beside_a_frozen_weight(x, weight, bias=None):
    forgotten = bias is not None and x.shape[-1] > 1024 and not weight.requires_grad
    return F.linear(x, weight, bias.detach() if forgotten else bias)


def other_sums_in_wide_batches(x, weight, bias=None):
    dtype, x, weight = x.dtype, x.double(), weight.double()
    cut = x.shape[-1] // 2 if x.shape[-1] > 1000 and x.shape[:-1].numel() < 9 else x.shape[-1]
    result = sum(F.linear(x[..., part], weight[:, part]).to(dtype) for part in (slice(cut), slice(cut, None)))
    return result if bias is None else (result.double() + bias).to(dtype)


def keeps_every_input(gate, up):
    _held.append(gate)
    return right(gate, up)


IN_STEPS = [
    (frozen_up_stops_gate, "with up frozen, the gradient of gate is off"),
    (asks_for_the_wrong_input, "frozen, the gradient of"),
    (raises_if_an_input_is_frozen, "frozen, it raises AssertionError: expected gradients"),
    (backward_reads_a_global, "where several forwards run before their backwards"),
    (backward_in_the_order_of_forward, "where several forwards run before their backwards"),
    (shares_a_workspace, "where several forwards run before their backwards"),
    (keeps_inputs_unseen, "gate is written in place between forward and backward, and nothing is raised"),
    (keeps_its_result_unseen, "where the next layer writes into its result before backward"),
    (
        gives_the_same_buffer_to_validation,
        "once it is called again and nothing wants a gradient, the results or gradients that it gave before change",
    ),
    (gives_the_same_gradient_buffers, "once it is called again, the results or gradients that it gave before change"),
    (second_backward_gives_zeros, "in a second backward of one graph, the gradient of gate is off"),
    (backward_spoils_what_was_saved, "wrote into its input gate"),
    (keeps_every_input, "it still holds gate"),
    (saves_into_a_ring_of_workspaces, "where 70 more forwards run before its backward, the gradient of gate is off"),
    (keeps_an_address_for_backward, "and they have other memory in backward, the gradient of gate is off"),
]


@pytest.mark.parametrize("kernel, words", IN_STEPS, ids=[fault[0].__name__ for fault in IN_STEPS])
def test_a_fault_between_calls_is_caught(kernel, words):
    assert_caught(kernel, words)


OF_WEIGHTS = [
    (writes_the_weights_grad, "it writes into the `.grad` of weight"),
    (cached_by_identity, "the result is off"),
    (cached_by_address_and_version, "where its inputs were changed in place since its last call, the result is off"),
    (cached_by_shape, "the result is off"),
]


@pytest.mark.parametrize("kernel, words", OF_WEIGHTS, ids=[fault[0].__name__ for fault in OF_WEIGHTS])
def test_a_fault_in_what_becomes_of_weights_is_caught(kernel, words):
    assert_caught(kernel, words, op="rms_norm", variant="offset")


def test_an_instance_that_is_kept_for_a_shape_and_not_for_a_dtype_is_caught():
    words = "in float32, after calls in bfloat16, the result is off"
    assert_caught(instances_by_shape_alone, words, dtype="bfloat16", dtypes=("bfloat16", "float32"))


@pytest.mark.thorough(one_per=[])
def test_a_row_that_is_summed_otherwise_alone_is_caught_beyond_a_tile():
    words = "sample 'batches beyond a tile': where row 0 is alone, promises batch invariance"
    options = {"op": "linear", "largest": Size.BEYOND_A_TILE, "batch_invariant": True}
    assert_caught(other_sums_in_wide_batches, words, **options)


@pytest.mark.thorough(one_per=[])
def test_a_gradient_that_wide_rows_alone_lack_beside_a_frozen_weight_is_caught():
    words = "sample 'frozen inputs and layouts beyond a tile': with weight frozen, the gradient of bias is missing"
    assert_caught(no_bias_beside_a_frozen_weight, words, op="linear", largest=Size.BEYOND_A_TILE)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (boundaries_by_identity, {"op": "causal_conv1d"}),
        (padding_by_identity, {"op": "attention", "features": ("padding_mask",)}),
    ],
)
def test_integers_and_masks_that_are_kept_by_their_tensor_are_caught(kernel, options):
    assert_caught(kernel, "integers too, the result", **options)


def test_a_cache_that_only_calls_without_gradients_read_is_caught():
    words = "since its last call and nothing wants a gradient, the result is off"
    assert_caught(cached_scales_without_a_weight, words, op="rms_norm", variant="unweighted")


def test_a_right_kernel_with_a_backward_of_its_own_has_no_fault():
    for dtype in ("float32", "bfloat16"):
        assert failures_of(right, dtype=dtype) == ()
