"""Compiles what the kernels launch for layers of real models' widths, for GPUs that are not here.

Run by ``test_compiled_ahead.py`` in a process of its own, since the other tests run in Triton's interpreter. Arguments:
the dtype, the GPU, and which calls. It writes one line of JSON for each call: its problem, and what its functions need.

The contract's samples are small, and ``veomni verify --compile-for`` compiles those. Launches for many rows and wide
layers are chosen here alone. No tensor is computed: what the kernels would write stays as it was allocated.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from veomni_conformance.triton_ahead import compiling_for
from veomni_conformance.triton_targets import Target
from veomni_core.descriptions.hardware import Hardware
from veomni_triton import (
    causal_conv1d,
    chunk_gated_delta_rule,
    load_balancing_loss,
    moe_experts,
    rms_norm,
    rms_norm_gated,
    rotary_pos_emb,
    rotary_pos_emb_vision,
    swiglu_mlp,
    token_logprobs,
)

Call = Callable[[], Tensor]


class MeasuredOnce(Target):
    """A GPU that is asked for the registers of one function alone.

    ptxas says them when it assembles a function again, which took a quarter of the time. Triton had it assemble each
    one already, and no test reads the numbers of these.
    """

    def resources(self, kernel: Any) -> tuple[int, int]:
        if self not in _MEASURED:
            _MEASURED[self] = super().resources(kernel)
        return _MEASURED[self]


_MEASURED: dict[Target, tuple[int, int]] = {}


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Calls that each have a launch of their own, and give one tensor that wants gradients."""

    def tensor(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, requires_grad=True)

    def experts(count: int, tokens: int, hidden: int, intermediate: int) -> Tensor:
        index, weights = torch.zeros(tokens, 2, dtype=torch.int64), tensor(tokens, 2)
        projections = tensor(count, 2 * intermediate, hidden), tensor(count, hidden, intermediate)
        return moe_experts.standard(tensor(tokens, hidden), index, weights, *projections)

    for width in (8192, 16384):
        yield f"norm of {width}", lambda width=width: rms_norm.standard(tensor(8, width), tensor(width), 1e-6)
        yield (
            f"gated norm of {width}",
            lambda width=width: rms_norm_gated.standard(tensor(8, width), tensor(8, width), tensor(width), 1e-6),
        )
    if dtype == torch.float32:  # all other launches have as many elements in a tile as those of 16 bits, or far fewer
        return
    yield "experts with few rows", lambda: experts(8, 256, 2048, 768)
    yield "experts with many rows", lambda: experts(2, 512, 2048, 768)
    yield "large experts", lambda: experts(2, 512, 4096, 2048)
    yield "experts that descriptors don't take", lambda: experts(2, 512, 2056, 772)
    heads, angles = (1, 8, 64, 128), (1, 64, 128)
    yield (
        "rotation",
        lambda: rotary_pos_emb.full(tensor(*heads), tensor(*heads), torch.empty(angles), torch.empty(angles))[0],
    )
    patches = (64, 16, 80)
    yield (
        "rotation of patches",
        lambda: rotary_pos_emb_vision.full(tensor(*patches), tensor(*patches), *torch.empty(2, 64, 80))[0],
    )
    yield "SwiGLU", lambda: swiglu_mlp.standard(tensor(64, 8192), tensor(64, 8192))
    yield "gated GELU", lambda: swiglu_mlp.gelu(tensor(64, 8192), tensor(64, 8192))
    for experts_count in (8, 512):
        yield (
            f"balance of {experts_count} experts",
            lambda count=experts_count: load_balancing_loss.standard((tensor(4096, count),) * 2, count, 2),
        )
    for widths in ((128, 128), (256, 256)):
        yield f"delta rule of heads of {widths}", lambda widths=widths: _delta_rule(tensor, *widths)
    yield (
        "convolution along positions",
        lambda: causal_conv1d.standard(tensor(1, 4096, 512), tensor(4096, 4), None, "silu"),
    )
    yield (
        "convolution along channels",
        lambda: causal_conv1d.standard(tensor(1, 512, 4096).mT, tensor(4096, 4), tensor(4096), "silu"),
    )
    labels = torch.zeros(64, dtype=torch.int64)
    yield "log-probabilities", lambda: token_logprobs.causal(kept_mib=0)(tensor(64, 256), tensor(4096, 256), labels)[0]


def _delta_rule(tensor: Callable[..., Tensor], key_width: int, value_width: int) -> Tensor:
    batch, length, heads = 1, 256, 4
    query, key = tensor(batch, length, heads, key_width), tensor(batch, length, heads, key_width)
    value = tensor(batch, length, heads, value_width)
    g, beta = tensor(batch, length, heads, of=torch.float32), tensor(batch, length, heads)
    return chunk_gated_delta_rule.standard(query, key, value, g, beta, use_qk_l2norm_in_kernel=True)[0]


def main(dtype: str, gpu: str, wanted: str = "") -> None:
    """Compile the calls whose names match ``wanted``."""
    for name, call in calls(getattr(torch, dtype)):
        if not re.search(wanted, name):
            continue
        problem = ""
        with compiling_for(MeasuredOnce.of(Hardware.named(gpu))) as compiled:
            try:
                result = call()
                result.backward(torch.empty_like(result))
            except Exception as error:  # the compiler's: each call is reported
                problem = f"{type(error).__name__}: {error}"
        functions = [asdict(each) for each in dict.fromkeys(compiled)]
        print(json.dumps({"gpu": gpu, "call": name, "problem": problem, "functions": functions}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
