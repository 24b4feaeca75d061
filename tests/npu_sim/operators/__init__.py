"""torch_npu's operators, each under the library's own schema and computed by its documented formula.

A file has ``SCHEMAS``, the operators' arguments and results; ``KERNELS``, what computes them from CPU tensors;
``META``, what gives their results' shapes to ``torch.compile``; and ``AUTOGRAD`` for those that the library
differentiates. Formulas and limits are those of ``_op_plugin_docs.py`` and of ``op_plugin/meta/_meta_registrations.py``
in the wheel of torch-npu 2.13.0.

Where they leave a limit open, the narrower reading holds here: npu_rotary_mul's tables have the input's dtype, and
npu_grouped_matmul's x is a transposed tensor where its columns are grouped. npu_rms_norm alone is wider than they say;
its docstring tells why.
"""

from __future__ import annotations

import functools

import torch

from npu_sim.dispatch import run_on_host
from npu_sim.operators import fusion_attention, grouped_matmul, moe_tokens, rms_norm, rotary_mul, swiglu
from veomni_core.kernels import first_derivatives_only

NAMESPACE = "npu"
MODULES = (fusion_attention, grouped_matmul, moe_tokens, rms_norm, rotary_mul, swiglu)
SCHEMAS = {name: schema for module in MODULES for name, schema in module.SCHEMAS.items()}


@functools.cache
def register() -> torch.library.Library:
    """Register every operator in PyTorch, which a process can do once; gives what holds the registrations."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for module in MODULES:
        for name, kernel in module.KERNELS.items():
            library.define(name + module.SCHEMAS[name])
            library.impl(name, functools.partial(run_on_host, kernel), "PrivateUse1")
        for name, shapes in module.META.items():
            library.impl(name, shapes, "Meta")
        for name, (save, gradients) in module.AUTOGRAD.items():
            gradients = first_derivatives_only(gradients)  # the library documents no second ones
            torch.library.register_autograd(f"{NAMESPACE}::{name}", gradients, setup_context=save, lib=library)
    return library
