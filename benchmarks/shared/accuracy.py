"""How far results are from those of float64; contenders are compared before they are timed."""

from __future__ import annotations

from torch import Tensor


def relative_error(found: Tensor, exact: Tensor) -> float:
    """``norm(found - exact) / norm(exact)``."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def hold(what: str, found: Tensor, exact: Tensor, allowed: float) -> None:
    """Stop unless ``found`` is within ``allowed`` of ``exact``, as norms."""
    error = relative_error(found.detach(), exact.detach())
    print(f"{what}: off by {error:.1e} of a float64 reference, allowed {allowed:.0e}")
    if not error <= allowed:
        raise SystemExit(f"{what}: wrong")
