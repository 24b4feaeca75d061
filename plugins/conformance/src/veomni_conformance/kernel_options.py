"""Checks that a kernel is right with each choice of its options, and with small and large numbers.

A job may set any of them, and the defaults are all that a check would ask without.
"""

from __future__ import annotations

from collections.abc import Iterator

from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Position, Subject
from veomni_core.descriptions.kernel_option import KernelOption, Value


def check_options(subject: Subject, positions: list[Position]) -> Iterator[str]:
    """Compute every sample with each value of each option that :func:`values_asked` gives, the others at defaults.

    Then with the first such value of every option.
    """
    kernel = subject.kernel
    asked = {option.name: values_asked(option) for option in subject.spec.options}
    alone = [{name: value} for name, values in asked.items() for value in values]
    together = {name: values[0] for name, values in asked.items() if values}
    for settings in [*alone, together] if len(together) > 1 else alone:
        chosen = " and ".join(f"{name}={value!r}" for name, value in settings.items())

        def problem(position: Position) -> Iterator[str]:
            words = f"with {chosen}, sample {subject.sample(position).name!r}"  # noqa: B023
            return reveal(words, lambda: subject.plain_problem(position))

        subject.kernel = subject.spec.configured("the conformance check", settings).load()
        try:
            yield from first_of(sentence for position in positions for sentence in problem(position))
        finally:
            subject.kernel = kernel


def values_asked(option: KernelOption) -> list[Value]:
    """The values of an option that are checked besides its default.

    All choices; of numbers without choices the least, the double of it, and the double of the default; both booleans.

    Example:
        >>> values_asked(KernelOption("rows", 256, minimum=1)), values_asked(KernelOption("keep", "a", ("a", "b")))
        ([1, 2, 512], ['b'])
    """
    kind, least = type(option.default), option.minimum
    if kind is bool:
        asked: list[Value] = [not option.default]
    elif option.choices:
        asked = list(option.choices)
    elif kind is str:
        asked = []
    else:
        assert not isinstance(option.default, str)
        few = [] if least is None else [kind(least), kind(2 * least or 1)]
        asked = [*few, kind(2 * option.default or 64)]
    return [value for value in dict.fromkeys(asked) if value != option.default]
