"""The former home of the conformance check, which is :mod:`veomni_conformance` now; goes with the next release."""

from veomni_core.moved_names import moved

_MOVED = ("CaseResult", "ConformanceReport", "KernelConformance", "check_kernel")
__getattr__ = moved(__name__, {"veomni_conformance": _MOVED})
