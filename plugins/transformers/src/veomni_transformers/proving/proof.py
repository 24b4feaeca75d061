"""The answer of a prover, and how a site is made from it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.sites.site import Site

Answer = TypeVar("Answer")
# The left_out of ops whose kernels take the boundaries of packed sequences (OpSpec.reads_boundaries).
KEPT_APART = {"": "packed sequences: transformers' own code mixes them; bound, they stay apart or are refused"}


@dataclass(frozen=True)
class Proof:
    """What the code at one place of a model computes, or why that could not be proven.

    Attributes:
        variant: the op's variant; ``None`` where none could be proven.
        evidence: how the variant was proven, or without a variant, what was tried.
        detail, examined, needs, refuses, declared, left_out: as in :class:`~veomni_core.Site`.
        op_name: the op, from a prover that compares with the variants of several ops.

    Example:
        >>> proven = Proof("standard", "its own code gave the reference's values and gradients", {"eps": 1e-6})
        >>> proven.site("rms_norm", "model.norm", "norm modules", sizes={"width": (32,)}).detail
        {'eps': 1e-06}
        >>> something_else = Proof(None, "its weight has 2 dimensions, expected one")  # it stays eager, for this reason
        >>> could_not_tell = Proof(None, "it raised ValueError when it was run alone", examined=False)
    """

    variant: str | None
    evidence: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    examined: bool = True
    needs: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)
    declared: bool = False
    op_name: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)

    def site(
        self,
        op_name: str,
        path: str,
        rule: str,
        *,
        dtype: str | None = None,
        own: str = EAGER,
        sizes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Site:
        """The site at ``path``, of the op that the proof names, or else of ``op_name``."""
        return Site(
            op_name=self.op_name or op_name,
            path=path,
            rule=rule,
            variant=self.variant,
            evidence=self.evidence,
            dtype=dtype,
            detail=self.detail,
            own=own,
            examined=self.examined,
            needs=self.needs,
            refuses=self.refuses,
            left_out=self.left_out,
            declared=self.declared,
            sizes=sizes or {},
        )


class ProvenOnce(Generic[Answer]):
    """Caches a prover's answers. Modules or functions that behave alike must have equal keys."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, Answer] = {}

    def of(self, key: Hashable, prove: Callable[[], Answer]) -> Answer:
        """The answer for ``key``; ``prove`` is called only if there is none yet."""
        if key not in self._answers:
            self._answers[key] = prove()
        return self._answers[key]
