"""Names that a command line gives, looked up; what isn't known is an error with the nearest name."""

from __future__ import annotations

from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.discovery.registry import Registry

DEVICES = ("cpu", "cuda", "rocm")  # the types that the core detects


def find_op(registry: Registry, name: str) -> OpSpec:
    """The op called ``name``, or the one whose config field is ``name``.

    Raises:
        UnknownNameError: there is neither.
    """
    by_field = {op.config_field: op for op in registry.ops.values()}
    return by_field[name] if name in by_field else registry.op(name)
