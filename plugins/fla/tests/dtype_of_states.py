"""Run in a process of its own, with fla-core first in its path: what KDA's kernels get in float32.

That is the gradients of states, and keys where a final state is returned. Everything before those kernels runs in
Triton's interpreter, on a CPU. Prints a JSON object.
"""

from __future__ import annotations

import json

import torch
from in_the_interpreter import make_fla_interpretable

from veomni_conformance.triton_interpreter import interpret_triton
from veomni_conformance.triton_searches import taking_launch


class Launched(Exception):
    """The kernel was launched; with its tensors."""


class Recorder:
    """In the place of a kernel."""

    def __getitem__(self, grid):
        def launch(**inputs):
            raise Launched(inputs)

        return launch


def dtypes(names, call, *arguments, **options):
    """Those of the tensors with these names, with which a kernel that is replaced is launched."""
    with taking_launch(0):
        try:
            call(*arguments, **options)
        except Launched as launched:
            return {name: str(launched.args[0][name].dtype) for name in names}


def main():
    interpret_triton()
    make_fla_interpretable()
    import fla.ops.common.chunk_delta_h as states
    import fla.ops.kda.chunk_bwd as backward

    from veomni_fla.kda import fla

    backward.chunk_kda_bwd_kernel_wy_dqkg_fused = Recorder()
    q = torch.ones(1, 4, 1, 16, dtype=torch.float16, requires_grad=True)
    call = (q, q, q, torch.zeros(1, 4, 1, 16), torch.ones(1, 4, 1))
    with taking_launch(0):
        output, _ = fla()(*call, use_qk_l2norm_in_kernel=True)
    found = {"backward": dtypes(["h", "dh"], output.sum().backward)}
    states.chunk_gated_delta_rule_fwd_kernel_h_blockdim64 = Recorder()
    for final in (True, False):
        found["a final state" if final else "none"] = dtypes(["k", "v"], fla(), *call, output_final_state=final)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
