"""What kernels that go over time in place say to ``torch.jit.trace``."""

from __future__ import annotations

import torch

from veomni_core.errors import BindingError


def refuse_traces(op: str) -> None:
    """Raise ``BindingError`` where a trace records: it would end in a failed look-up of TorchScript's, or fix lengths.

    Args:
        op: the op whose kernel is called.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise BindingError(
            f"torch.jit.trace can't record the kernel of {op}, which goes over time in place: choose eager "
            f"for {op}, undo the binding before the trace, or call torch.export.export"
        )
