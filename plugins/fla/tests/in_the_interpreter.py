"""Run in a process of its own, with fla-core first in its path: fla's kernels in Triton's interpreter, on a CPU.

``python in_the_interpreter.py KERNEL-DTYPE ...`` prints a JSON object with the failures of each kernel's contract.
Triton's interpreter is mended as for other kernels, and for two things that fla's do: they call a method of a loop's
index, and they search among launches, which needs a GPU. Here the first launch is taken.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from veomni_conformance import check_kernel
from veomni_conformance.triton_interpreter import interpret_triton
from veomni_conformance.triton_searches import taking_launch
from veomni_fla.plugin import veomni_kernels
from veomni_ops.catalog import OPS
from veomni_ops.contract import Size


class LoopIndex(int):
    """An index of a loop, which a GPU has as a number of Triton's."""

    def to(self, dtype):
        value = np.array([int(self)], dtype=np.int64 if dtype == tl.int64 else np.int32)
        return tl.tensor(TensorHandle(value, dtype), dtype)


def indices(*bounds):
    return map(LoopIndex, range(*bounds))


def make_fla_interpretable():
    """Import what the kernels need of fla, and mend it."""
    import fla.modules.causal_conv1d.ops
    import fla.modules.norm.fused_norm_gate
    import fla.ops.gated_delta_rule.chunk
    import fla.ops.kda.chunk  # noqa: F401

    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] != "fla":
            continue
        module.range = indices


def main(asked):
    with contextlib.suppress(ImportError):  # several times as fast, where the repository's own tests are
        import fast_interpreter  # noqa: F401
    interpret_triton()
    make_fla_interpretable()
    specs = {str(spec): spec for spec in veomni_kernels()}
    found = {}
    for each in asked:
        kernel, _, dtype = each.rpartition("-")
        op = next(op for op in OPS if op.name == specs[kernel].op_name)
        if op.name == "kda":  # minutes of it
            op = replace(op, contract="few_samples:CONTRACTS")
        spec = replace(specs[kernel], dtypes=(dtype,))  # the interpreter can't add numbers in bfloat16
        with taking_launch(0):
            report = check_kernel(spec, "cpu", dtype, op=op, largest=Size.SMALL, every_form=False)
        found[each] = {"cases": len(report.cases), "failures": report.failures}
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
