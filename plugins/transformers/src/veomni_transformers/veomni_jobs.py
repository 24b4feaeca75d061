"""Warnings for environments that were set up for VeOmni's own trainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

REMOVED_VARIABLES = {
    "VEOMNI_USE_LIGER_KERNEL": "rms_norm_implementation, rotary_pos_emb_implementation, swiglu_mlp_implementation and "
    "cross_entropy_loss_implementation",
    "USE_GROUP_GEMM": "moe_implementation",
    "VEOMNI_ENABLE_CHUNK_LOSS": "cross_entropy_loss_implementation: chunk_loss",
}


def warn_of_removed_variables(environ: Mapping[str, str]) -> None:
    """Warn of environment variables that selected kernels in VeOmni and select none here."""
    for variable, fields in REMOVED_VARIABLES.items():
        if variable in environ:
            warnings.warn(
                f"the environment variable {variable} no longer has any effect; write {fields} under "
                "model.ops_implementation",
                FutureWarning,
                stacklevel=4,
            )
