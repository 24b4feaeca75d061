"""The function that a bound linear-attention layer calls in place of its model's delta rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def delta_rule_call(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the arguments of the models' own one, which calls ``kernel`` with those that the op has.

    Boundaries may come under the name that models have for them, ``cu_seq_lens_q``. A model's chunk size changes no
    result, so it is dropped. So are the arguments that a model passes on unread, such as those for attention kernels.
    Several rows of packed sequences are computed as one row.

    Raises:
        ValueError: in a call, if ``seq_idx`` says that sequences are packed and no boundaries say where; or if several
            rows of packed sequences come with states, of which there is one for each row.
    """

    def delta_rule(
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
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens_of_rows: Tensor | None = None,
        **passed_on: Any,
    ) -> Any:
        inputs: tuple[Tensor, ...] = (query, key, value, g, beta)
        rows = len(query)
        cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        if cu_seqlens is None and cu_seqlens_of_rows is not None:
            if initial_state is not None or output_final_state:
                raise ValueError(f"linear attention got {rows} rows of packed sequences with states; pass one row")
            inputs, cu_seqlens = tuple(each.flatten(0, 1)[None] for each in inputs), cu_seqlens_of_rows
        if seq_idx is not None and cu_seqlens is None:
            raise ValueError(
                "linear attention got seq_idx without cu_seq_lens_q: to keep packed sequences apart, pass the model "
                "cu_seq_lens_q too (DataCollatorWithFlattening does with return_flash_attn_kwargs=True)"
            )
        output, final_state = kernel(
            *inputs,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )
        return output.view(rows, -1, *output.shape[2:]), final_state

    return delta_rule
