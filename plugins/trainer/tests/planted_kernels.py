"""The source of a plugin with kernels that compute a little else than their op, or can't be called as it says."""

PLUGIN = """
from veomni_core import KernelSpec, hookimpl
from veomni_ops.rms_norm import standard

VEOMNI_PLUGIN_API_VERSION = 1


def wrong(x, weight, eps):
    return standard(x, weight, eps) * 1.01


def wrong_for_heads(x, weight, eps):
    return standard(x, weight, eps) * (1.01 if x.dim() == 4 else 1.0)


def without_eps(x, weight):
    return standard(x, weight, 1e-6)


@hookimpl
def veomni_kernels():
    names = {"planted": "wrong", "planted_for_heads": "wrong_for_heads", "without_eps": "without_eps"}
    return [KernelSpec(name, "rms_norm", "standard", f"{__name__}:{at}") for name, at in names.items()]
"""
