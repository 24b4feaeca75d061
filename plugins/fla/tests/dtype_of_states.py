"""Run in a process of its own, with fla-core first in its path: the dtype in which KDA's kernel gets states' gradients.

Everything before that kernel runs in Triton's interpreter, on a CPU. Prints a JSON object.
"""

from __future__ import annotations

import json

import torch
from in_the_interpreter import make_fla_interpretable

from veomni_conformance.triton_interpreter import interpret_triton
from veomni_conformance.triton_searches import taking_launch


class Launched(Exception):
    """The kernel was launched; with the dtypes of its states and of their gradients."""


class Recorder:
    """In the place of the kernel."""

    def __getitem__(self, grid):
        def launch(*, h, dh, **others):
            raise Launched({"h": str(h.dtype), "dh": str(dh.dtype)})

        return launch


def main():
    interpret_triton()
    make_fla_interpretable()
    import fla.ops.kda.chunk_bwd as backward

    from veomni_fla.kda import fla

    backward.chunk_kda_bwd_kernel_wy_dqkg_fused = Recorder()
    q = torch.ones(1, 4, 1, 16, dtype=torch.float16, requires_grad=True)
    with taking_launch(0):
        output, _ = fla()(q, q, q, torch.zeros(1, 4, 1, 16), torch.ones(1, 4, 1), use_qk_l2norm_in_kernel=True)
        try:
            output.sum().backward()
        except Launched as launched:
            print(json.dumps(launched.args[0]))


if __name__ == "__main__":
    main()
