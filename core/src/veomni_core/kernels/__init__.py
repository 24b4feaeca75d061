"""What kernels share: casts as under autocast, aligned operands, refused second derivatives, the ignored label.

A kernel package imports this module beside the specs. It needs torch alone.
"""

from veomni_core.kernels.autocast import (
    autocast_dtype,
    autocast_off,
    cast_as_autocast,
    product_operands,
    without_autocast,
)
from veomni_core.kernels.first_derivatives import first_derivatives_only
from veomni_core.kernels.memory_layout import ALIGNMENT, aligned, begins_aligned, empty_like_aligned, is_aligned
from veomni_core.moved_names import moved

# The label of a position that counts in no loss: the default ``ignore_index`` of torch's cross entropy.
IGNORED = -100

__all__ = ["ALIGNMENT", "IGNORED", "aligned", "autocast_dtype", "autocast_off"]
__all__ += ["begins_aligned", "cast_as_autocast", "empty_like_aligned", "first_derivatives_only"]
__all__ += ["is_aligned", "product_operands", "without_autocast"]

__getattr__ = moved(
    __name__,
    {"veomni_ops.expert_ranks": ("ExpertRanks", "Experts"), "veomni_ops.router_softmax": ("as_softmax_takes",)},
)
