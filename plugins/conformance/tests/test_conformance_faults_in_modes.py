"""Faults that show without gradients, under autocast, in other modes, places and settings, and where dtypes meet."""

from __future__ import annotations

import random
import threading
import warnings

import numpy as np
import pytest
import torch
from planted_faults import SwiGLU, assert_caught, derivatives, failures_of, right
from torch.nn import functional as F

from veomni_conformance.process_state import ProcessState, check_process_state
from veomni_conformance.subject import Position, Subject
from veomni_core import KernelSpec
from veomni_ops import attention, rms_norm, swiglu_mlp
from veomni_ops.contract import Size

_state = threading.local()
_state.factor = 1.0


def wrong_without_gradients(gate, up):
    return right(gate, up) if torch.is_grad_enabled() else F.silu(gate) * up * 1.01


def wrong_in_inference_mode(gate, up):
    return swiglu_mlp.standard(gate, up) * (0.5 if torch.is_inference_mode_enabled() else 1.0)


def writes_into_its_input_without_gradients(gate, up):
    keeps = torch.is_grad_enabled() or torch.is_inference_mode_enabled()  # a check of the latter alone comes first
    return right(gate, up) if keeps else gate.copy_(F.silu(gate) * up).clone()


def gives_its_input_without_gradients(gate, up):
    return right(gate, up) if torch.is_grad_enabled() else up.copy_(F.silu(gate) * up)


def writes_into_results_of_other_layers(gate, up):
    result = right(gate, up)
    if not gate.is_leaf:
        gate.data.zero_()
    return result


def halves_under_autocast(gate, up):
    return right(gate, up) * (0.5 if torch.is_autocast_enabled("cpu") else 1.0)


def float16_under_autocast(gate, up):
    result = right(gate, up)
    return result.half() if torch.is_autocast_enabled("cpu") else result


def rounds_a_norm_under_autocast(x, weight, eps):
    if torch.is_autocast_enabled("cpu"):
        return rms_norm.offset(x.bfloat16(), weight, eps).to(x.dtype)
    return rms_norm.offset(x, weight, eps)


def another_result_in_another_thread(gate, up):
    return right(gate, up) * getattr(_state, "factor", 2.0)


class _KeptByThread(SwiGLU):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.key = object()
        _state.__dict__[ctx.key.__hash__().__str__()] = gate.detach(), up.detach()
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, upstream):
        return derivatives(*_state.__dict__.pop(str(hash(ctx.key))), upstream)


def keeps_by_thread(gate, up):
    return _KeptByThread.apply(gate, up)


def another_result_where_algorithms_must_be_deterministic(gate, up):
    return right(gate, up) * (1.5 if torch.are_deterministic_algorithms_enabled() else 1.0)


def reads_memory_before_writing(gate, up):
    buffer = torch.empty_like(gate)
    return right(gate, up) + torch.where(buffer.isnan(), buffer, 0.0).detach()


def accumulates_in_the_default_dtype(gate, up):
    total = torch.zeros(gate.shape)
    total += swiglu_mlp.standard(gate, up).detach()
    result = right(gate, up)
    return result - result.detach() + total.to(gate.dtype)


def wrong_in_evaluation(module, *args, **options):
    output, weights = attention.standard(module, *args, **options)
    return output if module.training else output * 0.9, weights


def ignores_evaluation(module, *args, **options):
    output, weights = attention.standard(module, *args, **options)
    return output * 0.9 if module.training else output, weights


class _RecognisesWhatItSaved(SwiGLU):
    """Takes what comes back for what it saved, by address."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.address = gate.data_ptr()
        return SwiGLU.forward(ctx, gate, up)

    @staticmethod
    def backward(ctx, upstream):
        gate, up = ctx.saved_tensors
        scale = 1.0 if gate.data_ptr() == ctx.address else 0.0
        return tuple(each * scale for each in derivatives(gate, up, upstream))


def recognises_what_it_saved(gate, up):
    return _RecognisesWhatItSaved.apply(gate, up)


IN_MODES = [
    (wrong_without_gradients, "under torch.no_grad(), the result is off"),
    (wrong_in_inference_mode, "under torch.inference_mode(), the result is off"),
    (writes_into_its_input_without_gradients, "under torch.no_grad(), it wrote into its input gate"),
    (gives_its_input_without_gradients, "under torch.no_grad(), it"),
    (writes_into_results_of_other_layers, "where its inputs are other layers' results, it wrote into its input gate"),
    (halves_under_autocast, "under autocast to bfloat16, the result is off"),
    (float16_under_autocast, "under autocast to bfloat16, it gives dtype float16"),
    (another_result_in_another_thread, "in another thread, the result is off"),
    (keeps_by_thread, "where its backward runs in another thread, it raises KeyError"),
    (another_result_where_algorithms_must_be_deterministic, "with deterministic algorithms asked for, the result"),
    (reads_memory_before_writing, "with deterministic algorithms asked for, the result is not finite"),
    (accumulates_in_the_default_dtype, "with bfloat16 as torch's default dtype, the result is off"),
    (recognises_what_it_saved, "where what is saved for backward is copied, as by offloading,"),
]


@pytest.mark.parametrize("kernel, words", IN_MODES, ids=[fault[0].__name__ for fault in IN_MODES])
def test_a_fault_in_one_mode_is_caught(kernel, words):
    assert_caught(kernel, words)


def test_a_norm_that_autocast_makes_coarser_than_eager_is_caught():
    words = "under autocast to bfloat16, the result is off"
    assert_caught(rounds_a_norm_under_autocast, words, op="rms_norm", variant="offset")


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("kernel, mode", [(wrong_in_evaluation, "evaluation"), (ignores_evaluation, "training")])
def test_attention_that_differs_between_training_and_evaluation_is_caught(kernel, mode):
    features = ("dense_mask", "padding_mask", "sliding_window", "packed", "softcap", "sinks", "query_sinks")
    features += ("position_bias", "chosen_keys")
    failures = failures_of(kernel, op="attention", features=features)
    assert failures
    if mode == "evaluation":  # the samples are in training mode, so the other fault shows in their values
        assert any("with its module in evaluation mode, the result is off" in failure for failure in failures)


def _leaves_changed(change, in_backward=False):
    class Leaves(SwiGLU):
        @staticmethod
        def forward(ctx, gate, up):
            if not in_backward:
                change()
            return SwiGLU.forward(ctx, gate, up)

        @staticmethod
        def backward(ctx, upstream):
            if in_backward:
                change()
            return SwiGLU.backward(ctx, upstream)

    return Leaves.apply


SEED = 50_423  # not one that a job of another test has left behind
STATES = {
    "torch's random state": lambda: torch.manual_seed(SEED),
    "torch's random state by drawing": lambda: torch.rand(1),
    "Python's random state": lambda: random.seed(SEED),
    "NumPy's random state": lambda: np.random.seed(SEED),
    "NumPy's error handling": lambda: np.seterr(all="ignore"),
    "the default dtype": lambda: torch.set_default_dtype(torch.float16),
    "the number of threads": lambda: torch.set_num_threads(3),
    "float32's precision in products (TF32)": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "float32's precision by its name": lambda: torch.set_float32_matmul_precision("medium"),
    "the deterministic-algorithms flag": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "the same flag, set to what is usual": lambda: torch.use_deterministic_algorithms(False),
    "cuDNN's benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cuDNN's benchmark, switched off": lambda: setattr(torch.backends.cudnn, "benchmark", False),
    "cuDNN's allow_tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "the warnings filters": lambda: warnings.simplefilter("ignore", ResourceWarning),
    "whether sdpa may use its flash kernel": lambda: torch.backends.cuda.enable_flash_sdp(False),
}
_changing = {"forward": right}


def changes_state(gate, up):
    return _changing["forward"](gate, up)


@pytest.mark.thorough(one_per=["in_backward"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("state", STATES)
def test_a_kernel_that_changes_the_process_is_caught(state, in_backward):
    if in_backward and state == "autocast":
        pytest.skip("autograd itself puts autocast's state back after a backward")
    before = ProcessState()
    kernel = _leaves_changed(STATES[state], in_backward)
    spec = KernelSpec("changes", "swiglu_mlp", "standard", "nowhere:kernel")
    subject = Subject(spec, kernel, swiglu_mlp.CONTRACTS["standard"], torch.device("cpu"), torch.float32)
    found = list(check_process_state(subject, Position(Size.SMALL, 0), other_threads=True))
    assert before.changes() == [], "the check puts back what the kernel changed"
    assert found, "nothing was found"
    assert all("changes" in sentence for sentence in found)


def test_the_whole_check_names_what_a_kernel_changes():
    _changing["forward"] = _leaves_changed(lambda: torch.set_default_dtype(torch.float64))
    try:
        assert_caught(changes_state, "changes the default dtype")
    finally:
        _changing["forward"] = right
    assert torch.get_default_dtype() == torch.float32


def weight_in_float32_is_taken_for_the_dtype_of_x(x, weight, eps):
    return rms_norm.standard(x, weight.view(x.dtype)[: x.shape[-1]] if weight.dtype != x.dtype else weight, eps)


def gives_the_weights_dtype(x, weight, eps):
    return rms_norm.cast_after(x, weight, eps).to(weight.dtype)


def refuses_mixed_dtypes(x, weight, eps):
    if x.dtype != weight.dtype:
        raise ValueError(f"x is in {x.dtype} and weight in {weight.dtype}: cast one of them")
    return rms_norm.cast_after(x, weight, eps)


def test_mixed_dtypes_are_right_or_refused():
    options = {"op": "rms_norm", "dtype": "bfloat16"}
    words = "with weight in float32 and the rest in bfloat16"
    under = f"{words} under autocast to bfloat16, the result is off"
    assert_caught(weight_in_float32_is_taken_for_the_dtype_of_x, under, variant="standard", **options)
    assert_caught(
        gives_the_weights_dtype,
        "with x in float32 and the rest in bfloat16, it gives dtype bfloat16",
        variant="cast_after",
        **options,
    )
    assert failures_of(refuses_mixed_dtypes, variant="cast_after", **options) == ()
