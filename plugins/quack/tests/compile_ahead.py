"""Compiles, for SM90 and without a GPU, the QuACK kernels that the plugin's calls ask for; prints each one's seconds.

Run by ``test_compiling_ahead.py`` in a process of its own: QuACK's switches are read once, when it is imported.
QuACK then compiles where it would launch. The grouped products take tensors of the CPU; norms, rotations and losses
take fake tensors of a GPU. QuACK 0.4 has a switch that leaves launching out; for 0.6, what CuTe compiled is dropped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace

os.environ.update(QUACK_ARCH="90", CUTE_DSL_ARCH="sm_90a", QUACK_CACHE_ENABLED="0")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from veomni_quack import rms_norm, rotary_pos_emb, versions
from veomni_quack.cross_entropy_loss import quack_calls
from veomni_quack.moe_experts import grouped_gemm

# What the operators do, and not what their fakes do, which compile nothing.
rms_norm._forward, rms_norm._backward = rms_norm._normalised, rms_norm._gradients

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, K = 4, 64, 32, 24, 2
ROWS = TOKENS * K
HALF = (torch.bfloat16, torch.float16)
EVERY = (torch.float32, *HALF)


def timed(name: str, call: Callable[[], object]) -> None:
    """Run ``call``, which compiles."""
    started = time.perf_counter()
    call()
    print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)


def experts(dtype: torch.dtype) -> None:
    """The products of the experts, forward and backward."""
    x, rows = torch.empty(TOKENS, HIDDEN, dtype=dtype), torch.empty(ROWS + 1, HIDDEN, dtype=dtype)[:ROWS]
    gate_up = torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=dtype)
    down = torch.empty(EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype)
    offsets, token = torch.zeros(EXPERTS + 1, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    pre, activated = grouped_gemm.gated(x, gate_up, offsets, token)
    grouped_gemm.rows(activated, down.mT, offsets, rows, interleaved=False)
    dpre, activated, dweights = grouped_gemm.gated_backward(x, down, pre, torch.empty(ROWS), offsets, token)
    assert dpre.shape == (ROWS, 2 * INTERMEDIATE) and activated.shape == (ROWS, INTERMEDIATE)
    assert dweights.shape == (ROWS,) and dweights.dtype == torch.float32
    grouped_gemm.gradient(x, activated, offsets, token, out=torch.empty_like(down), interleaved=False)
    grouped_gemm.rows(dpre, gate_up, offsets, rows, interleaved=True)
    grouped_gemm.gradient(x, dpre, offsets, token, out=torch.empty_like(gate_up).mT, interleaved=True)


def head(dtype: torch.dtype) -> None:
    """The head's weight gradient, written, added to and scaled, from rows that are padded to 16 bytes."""
    dlogits, hidden = torch.empty(TOKENS, 104, dtype=dtype)[:, :101], torch.empty(TOKENS, HIDDEN, dtype=dtype)
    so_far = torch.empty(101, HIDDEN)
    for first in (True, False):
        quack_calls.add_product(dlogits, hidden, so_far, first)
    for given in (so_far, None):
        quack_calls.scaled_sum(dlogits, hidden, given, torch.ones(()), torch.empty(101, HIDDEN, dtype=dtype))


def losses(dtype: torch.dtype, vocabulary: int) -> None:
    """The loss with its gradient."""
    logits, labels = gpu(TOKENS, vocabulary, dtype=dtype), gpu(TOKENS, dtype=torch.int64)
    quack_calls.losses_and_gradient(logits, labels, gpu(TOKENS), -100)


class Context:
    """Stands for autograd's, which knows no device that PyTorch isn't built for."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors


def norm(dtype: torch.dtype, width: int, weight_dtype: torch.dtype | None, round_before_weight: bool) -> None:
    """Forward and backward."""
    context, x = Context(), gpu(TOKENS, width, dtype=dtype)
    weight = None if weight_dtype is None else gpu(width, dtype=weight_dtype)
    result = rms_norm._RMSNorm.forward(context, x, weight, 1e-6, round_before_weight)
    assert result.shape == x.shape
    dx, dweight, *_ = rms_norm._RMSNorm.backward(context, torch.empty_like(result))
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
    assert weight is None or (dweight.shape, dweight.dtype) == (weight.shape, weight.dtype)


def rotation(dtype: torch.dtype, angle_dtype: torch.dtype, width: int, batch_of_angles: int) -> None:
    """Forward and backward, pairs at a distance and of neighbours."""
    angles = gpu(batch_of_angles, 7, width // 2, dtype=angle_dtype)
    for neighbours in (False, True):
        table = rotary_pos_emb._Angles(angles, angles, neighbours, backwards=False, whole=True)
        for heads in (4, 1):
            x = gpu(2, 7, heads, width, dtype=dtype)
            for backwards in (False, True):
                result = rotary_pos_emb._turned(x, table.cos, table.sin, table.starts, neighbours, backwards)
                assert (result.shape, result.dtype) == (x.shape, x.dtype)


def gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of a GPU that isn't here; only within :class:`FakeTensorMode`."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def launch_nothing() -> None:
    """From here on QuACK compiles, and nothing else."""
    if versions.OLD:
        from quack import cache_utils

        cache_utils.COMPILE_ONLY = True
        return
    import cutlass.cute
    import quack.gemm
    import quack.gemm_runtime.host
    from quack.rmsnorm import _rmsnorm_bwd_f

    compile_kernel = cutlass.cute.compile

    def compiled(*arguments: object, **options: object) -> Callable[..., None]:
        compile_kernel(*arguments, **options)
        return lambda *_: None

    cutlass.cute.compile = compiled
    for module in (quack.gemm, quack.gemm_runtime.host):
        module.get_max_active_clusters = lambda *_, **__: 1  # asks the driver
    _rmsnorm_bwd_f.register_fake(_rmsnorm_bwd_f._init_fn)


def main() -> None:
    launch_nothing()
    try:
        head(torch.bfloat16)
    except Exception as error:  # CuTe asks for a driver once in a process that has none, and not again
        if "Driver" not in str(error):
            raise
    for dtype in HALF:
        timed(f"experts, {dtype}", lambda d=dtype: experts(d))
        timed(f"head, {dtype}", lambda d=dtype: head(d))
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132, major=9)
    with FakeTensorMode(), torch.no_grad():
        for dtype in HALF:
            for vocabulary in (104, 151936):
                timed(f"losses, {dtype}, {vocabulary}", lambda d=dtype, v=vocabulary: losses(d, v))
        for dtype in EVERY:
            for width in (97, 4096):
                for weight_dtype in (None, *{dtype, torch.float32}):
                    for first in {False, weight_dtype is not None and dtype != torch.float32}:
                        name = (
                            f"norm, {dtype}, weight {weight_dtype} {'after' if first else 'before'} rounding, {width}"
                        )
                        timed(name, lambda d=dtype, w=width, v=weight_dtype, f=first: norm(d, w, v, f))
            for angle_dtype in {dtype, torch.float32}:
                for width, batch in ((32, 1), (128, 2)):
                    name = f"rotation, {dtype} by {angle_dtype}, {width}, {batch} tables"
                    timed(name, lambda d=dtype, a=angle_dtype, w=width, b=batch: rotation(d, a, w, b))


if __name__ == "__main__":
    main()
