"""Over how many ranks a model's parameters are divided, and in which way. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from veomni_core.descriptions.field_types import check_fields
from veomni_core.errors import SpecError


@dataclass(frozen=True)
class Sharding:
    """The number of ranks over which each way of sharding divides a module's parameters; 1 where it does not.

    Attributes:
        fsdp: ranks of FSDP2 (``fully_shard``). Their parameters are whole while a forward runs.
        tp: ranks of tensor parallelism. Each computes with its part of the weights.
        ep: ranks of expert parallelism. Each holds some of the experts, whole.

    Example:
        >>> str(Sharding(fsdp=4, ep=2)), str(Sharding())
        ('FSDP2 over 4, experts over 2', 'whole')
        >>> Sharding(tp=2).divides_forward, Sharding(fsdp=8).divides_forward
        (True, False)
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


@dataclass(frozen=True)
class EngineLayout:
    """How transformers' distributed engine divides a model: the number of ranks in each dimension, and its styles.

    A style (``colwise``, ``ep_dispatch_experts``, ...) says how one module or parameter is divided.

    Attributes:
        fsdp: ranks that read different batches, and shard each parameter between them.
        tp: ranks that read the same batch and divide the tensors of ``tp_styles``.
        ep: ranks that divide the experts of ``ep_styles``.
        tp_styles, ep_styles: the engine's styles, by the path of a module or parameter.
        ep_implementation: the engine's name of how tokens reach the experts' ranks.

    Example:
        >>> styles = {"mlp": "ep_dispatch_experts", "mlp.gate_up_proj": "grouped_gemm"}
        >>> layout = EngineLayout(fsdp=8, ep=4, ep_styles=styles)
        >>> str(layout.of("mlp")), str(layout.of("norm"))
        ('FSDP2 over 2, experts over 4', 'FSDP2 over 8')
        >>> layout.styles_at("mlp")
        {'': 'ep_dispatch_experts', 'gate_up_proj': 'grouped_gemm'}
    """

    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    tp_styles: Mapping[str, str] = field(default_factory=dict)
    ep_styles: Mapping[str, str] = field(default_factory=dict)
    ep_implementation: str = "auto"

    def of(self, path: str) -> Sharding:
        """The sharding of the parameters at and below ``path``."""
        tp = self.tp if _any_at(self.tp_styles, path) else 1
        ep = self.ep if _any_at(self.ep_styles, path) else 1
        # Experts are sharded by the ranks that hold the same ones, other parameters by the ranks with other batches.
        fsdp = self.fsdp * self.tp // self.ep if path in self.ep_styles else self.fsdp
        return Sharding(fsdp, tp, ep)

    def styles_at(self, path: str) -> dict[str, str]:
        """The styles at and below ``path``, by relative path: that of the module itself is under ``""``."""
        styles = {**self.tp_styles, **self.ep_styles}
        return {_below(path, each): style for each, style in styles.items() if _is_at(each, path)}


def parts(size: int, ranks: int) -> tuple[int, ...]:
    """The different sizes of the ranks' parts of a dimension, the largest first; the last parts may be shorter.

    Example:
        >>> parts(96, 2), parts(101, 4), parts(5, 4)
        ((48,), (26, 23), (2, 1, 0))
    """
    largest = -(-size // ranks)
    return tuple(dict.fromkeys(min(largest, max(0, size - rank * largest)) for rank in range(ranks)))


def _any_at(styles: Mapping[str, str], path: str) -> bool:
    return any(_is_at(each, path) for each in styles)


def _is_at(each: str, path: str) -> bool:
    return not path or each == path or each.startswith(f"{path}.")


def _below(path: str, each: str) -> str:
    return each[len(path) :].lstrip(".")
