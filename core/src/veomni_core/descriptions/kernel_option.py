"""A setting of a kernel that a job's YAML may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from veomni_core.descriptions.field_types import check_fields
from veomni_core.errors import ConfigError, SpecError

Value = bool | int | float | str
_TYPES = (bool, int, float, str)


@dataclass(frozen=True)
class KernelOption:
    """One setting of a kernel, which its factory takes as a keyword argument.

    Args:
        name: the option's name in configs, and the factory's parameter.
        default: the value where the job sets none. Its type (bool, int, float or str) is the option's.
        choices: the values that are allowed; if empty, any value of the type.
        minimum: the smallest number that is allowed; ``None`` for no limit.
        description: one line for ``veomni explain``.

    Raises:
        SpecError: a field has the wrong type, or ``default`` is not allowed by the others.

    Example:
        >>> chunk = KernelOption("chunk_rows", 1024, minimum=1, description="rows of logits at a time")
        >>> chunk.check("cross_entropy_loss_implementation", 512)
        512
        >>> chunk.check("cross_entropy_loss_implementation", 0)
        Traceback (most recent call last):
            ...
        veomni_core.errors.ConfigError: cross_entropy_loss_implementation: chunk_rows must be at least 1, got 0
    """

    name: str
    default: Value
    choices: tuple[Value, ...] = ()
    minimum: float | None = None
    description: str = ""

    def __post_init__(self) -> None:
        owner = f"KernelOption {self.name!r}"
        check_fields(self, owner)
        if type(self.default) not in _TYPES:
            raise SpecError(f"{owner}: default must be a bool, int, float or str, not {self.default!r}")
        if self.minimum is not None and type(self.default) not in (int, float):
            advice = "remove it, or give a number as default"
            raise SpecError(f"{owner}: minimum is for numbers; {advice}, not {self.default!r}")
        if self.minimum is not None and type(self.minimum) not in (int, float):
            raise SpecError(f"{owner}: minimum must be a number or None, not {self.minimum!r}")
        try:
            for value in (*self.choices, self.default):
                self.check(owner, value)
        except ConfigError as error:
            raise SpecError(str(error)) from None

    def check(self, where: str, value: Any) -> Value:
        """``value`` in the option's type; ``where`` names the place in the config, for messages.

        Raises:
            ConfigError: ``value`` has another type, or is not allowed.
        """
        kind = type(self.default)
        if kind is float and type(value) is int and abs(value) < 2**64:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{where}: {self.name} must be of type {kind.__name__}, got {value!r}")
        if self.choices and value not in self.choices:
            allowed = ", ".join(map(repr, self.choices))
            raise ConfigError(f"{where}: {self.name} must be one of {allowed}, got {value!r}")
        if self.minimum is not None and not isinstance(value, str) and value < self.minimum:
            raise ConfigError(f"{where}: {self.name} must be at least {self.minimum:g}, got {value!r}")
        return value  # type: ignore[no-any-return]
