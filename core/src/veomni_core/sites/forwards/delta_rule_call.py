"""The function that a bound linear-attention layer calls in place of its model's gated delta rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def delta_rule_call(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the arguments of the models' own one, which calls ``kernel`` with those that the op has.

    A model's chunk size changes no result, so it is dropped. So are the arguments that a model passes on unread, such
    as those for attention kernels.

    Raises:
        ValueError: in a call, if ``seq_idx`` says that sequences are packed and ``cu_seqlens`` doesn't say where.
    """

    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **passed_on: Any,
    ) -> Any:
        if seq_idx is not None and cu_seqlens is None:
            raise ValueError(
                "linear attention got seq_idx without cu_seq_lens_q: to keep packed sequences apart, pass the model "
                "cu_seq_lens_q too (DataCollatorWithFlattening does with return_flash_attn_kwargs=True)"
            )
        return kernel(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )

    return chunk_gated_delta_rule
