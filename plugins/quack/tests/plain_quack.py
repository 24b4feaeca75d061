"""QuACK's norm and rotation in plain PyTorch, with its signatures and CuTe's checks: what the adapters are tested with.

Without QuACK the adapters are imported over empty modules of its names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import torch
from cute_checks import check, common_width

_LIBRARY = {
    "quack": {"__version__": "0.6.5"},
    "quack.cache": {"CACHE_ENABLED": False, "get_cache_path": None},
    "quack.cross_entropy": {"cross_entropy_fwd_out": None},
    "quack.epilogue": {},
    "quack.epilogue.library": {},
    "quack.gemm_interface": dict.fromkeys(("default_config", "gemm_tuned", "gemm_gated", "gemm_dgated")),
    "quack.rmsnorm": dict.fromkeys(("rmsnorm_fwd", "rmsnorm_bwd")),
    "quack.rotary": {"apply_rotary": None},
}


def adapter(name: str) -> ModuleType:
    """The module ``veomni_quack.<name>``, to be given calls in the place of QuACK's."""
    if importlib.util.find_spec("quack") is not None:
        return importlib.import_module(f"veomni_quack.{name}")
    for library, content in _LIBRARY.items():
        sys.modules[library] = ModuleType(library)
        vars(sys.modules[library]).update(content)
    try:
        return importlib.import_module(f"veomni_quack.{name}")
    finally:
        for library in _LIBRARY:
            del sys.modules[library]


def rmsnorm_fwd(x, weight=None, out_dtype=None, eps=1e-6, store_rstd=False):
    assert store_rstd and x.dim() == 2
    out = torch.empty_like(x, dtype=out_dtype)
    width = common_width(x.shape[1], x, weight, out)
    for name, operand in (("mX", x), ("mW", weight), ("mO", out)):
        if operand is not None:
            check(name, operand, width)
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    result = x.float() * rstd[:, None]
    out.copy_(result if weight is None else result * weight.float())
    return out, x, rstd


def rmsnorm_bwd(x, weight, dout, rstd):
    dx = torch.empty_like(x)
    width = common_width(x.shape[1], x, dout, dx)
    for name, operand in (("mX", x), ("mW", weight), ("mdO", dout), ("mdX", dx)):
        if operand is not None:
            check(name, operand, width)
    normalised = x.float() * rstd[:, None]
    upstream = dout.float() if weight is None else dout.float() * weight.float()
    slope = (normalised * upstream).mean(-1, keepdim=True)
    dx.copy_((upstream - normalised * slope) * rstd[:, None])
    dweight = None if weight is None else (dout.float() * normalised).sum(0).to(weight.dtype)
    return dx, dweight, None, None


def apply_rotary(x, cos, sin, seqlen_offsets=None, interleaved=False, conjugate=False):
    out, (batch, length, _, _), pairs = torch.empty_like(x), x.shape, cos.shape[1]
    for name, operand in (("mX", x), ("mO", out)):
        check(name, operand, common_width(2 * pairs, x))
    for name, operand in (("mCos", cos), ("mSin", sin)):
        check(name, operand, common_width(pairs, cos))
    starts = torch.zeros(batch, dtype=torch.int32) if seqlen_offsets is None else seqlen_offsets
    places = starts[:, None] + torch.arange(length)
    c, s = (table[places].float()[:, :, None] for table in (cos, -sin if conjugate else sin))
    turned = x[..., : 2 * pairs].float()
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    halves = (first * c - second * s, first * s + second * c)
    out[..., : 2 * pairs] = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    out[..., 2 * pairs :] = x[..., 2 * pairs :]
    return out


CALLS = SimpleNamespace(rmsnorm_fwd=rmsnorm_fwd, rmsnorm_bwd=rmsnorm_bwd, apply_rotary=apply_rotary)
