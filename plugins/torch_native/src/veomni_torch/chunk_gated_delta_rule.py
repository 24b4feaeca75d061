"""The gated delta rule in plain PyTorch, chunk by chunk, and token by token in a fixed order."""

from __future__ import annotations

from functools import partial

from veomni_ops.chunk_gated_delta_rule import check_call
from veomni_torch.delta_rule_call import delta_rule
from veomni_torch.delta_rule_in_fixed_order import in_fixed_order

standard = partial(delta_rule, check=check_call)
standard_in_fixed_order = partial(standard, rule=in_fixed_order)
