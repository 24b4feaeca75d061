"""How far results are from those of float64; contenders are compared before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def relative_error(found: Tensor, exact: Tensor) -> float:
    """``norm(found - exact) / norm(exact)``."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def errors(
    what: str, names: Sequence[str], results: Callable[[], Sequence[Tensor]], exact: Sequence[Tensor]
) -> dict[str, float] | str:
    """The relative error of each of ``results``, by name; or why there are none."""
    try:
        pairs = zip(names, results(), exact, strict=True)
    except Exception as error:  # the others are measured all the same
        print(f"{what} raises {type(error).__name__}: {error}", flush=True)
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    found = {name: relative_error(mine, true) for name, mine, true in pairs}
    print(f"{what}: " + ", ".join(f"{name} {error:.1e}" for name, error in found.items()), flush=True)
    return found


def hold(what: str, found: Tensor, exact: Tensor, allowed: float) -> None:
    """Stop unless ``found`` is within ``allowed`` of ``exact``, as norms."""
    error = relative_error(found.detach(), exact.detach())
    print(f"{what}: off by {error:.1e} of a float64 reference, allowed {allowed:.0e}")
    if not error <= allowed:
        raise SystemExit(f"{what}: wrong")
