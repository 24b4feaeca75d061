"""Over how many ranks a model's parameters are divided, and in which way. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from veomni_core.descriptions.field_types import check_fields
from veomni_core.errors import SpecError


@dataclass(frozen=True)
class Sharding:
    """The number of ranks over which each way of sharding divides a module's parameters; 1 where it does not.

    Attributes:
        fsdp: ranks of FSDP2 (``fully_shard``). Their parameters are whole while a forward runs.
        tp: ranks of tensor parallelism. Each computes with its part of the weights.
        ep: ranks of expert parallelism. Each holds some of the experts, whole.
    """

    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "Sharding", names=())
        for name in ("fsdp", "tp", "ep"):
            if getattr(self, name) < 1:
                raise SpecError(f"Sharding: {name} is {getattr(self, name)}; it is a number of ranks, at least 1")

    @property
    def divides_forward(self) -> bool:
        """Whether a rank's forward computes with a part of the parameters."""
        return self.tp > 1 or self.ep > 1

    def __str__(self) -> str:
        ways = (("FSDP2 over", self.fsdp), ("tensors over", self.tp), ("experts over", self.ep))
        return ", ".join(f"{way} {ranks}" for way, ranks in ways if ranks > 1) or "whole"


WHOLE = Sharding()
