"""docs/reference/ops.md: every op of the core with its contracts: formula, signature and tolerances."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

from reference_pages.markdown import prose, table
from reference_pages.repository import registry
from veomni_core.descriptions.op_spec import OpSpec
from veomni_ops.contract import Contract, contract_for

_HEAD = """# Ops and their contracts

An op is a computation for which kernels can be plugged in. Each of its variants is defined by a reference in plain
PyTorch, which on float64 inputs is the oracle. A kernel `y` meets the contract if for each result and each gradient,
on every sample, `|y - o| <= element * (|o| + rms(o))` for every element and `norm(y - o) <= norm * norm(o)` for the
whole tensor, where `o` is the oracle's. `veomni verify` runs the samples. [What contracts
ask](asked.md) lists what they hold.
"""


def page() -> str:
    """The page's text."""
    return "\n".join([_HEAD, *(line for op in registry().ops.values() for line in _section(op))])


def _section(op: OpSpec) -> Iterator[str]:
    contracts = [contract_for(op, variant) for variant in op.variants]
    yield f"## `{op.name}`\n"
    description = op.description[:1].upper() + op.description[1:]
    yield f"{description}. Field `{op.config_field}`; [kernels](kernels.md#{op.name}).\n"
    yield f"{prose(importlib.import_module(op.contract.partition(':')[0]))}\n"
    for contract in contracts:
        yield from _variant(op, contract)
    yield "Allowed, as `element` and `norm`:\n"
    yield from table(("variant", "dtype", "results", "gradients"), _tolerances(contracts))
    yield ""


def _variant(op: OpSpec, contract: Contract) -> Iterator[str]:
    aliases = [f"`{alias}`" for alias, variant in op.variant_aliases.items() if variant == contract.variant]
    also = f" (also {', '.join(aliases)})" if aliases else ""
    parameters = ", ".join(
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(contract.reference).parameters.values()
    )
    yield f"**`{contract.variant}`**{also}: `({parameters})`\n"
    yield f"{prose(contract.reference)}\n"


def _tolerances(contracts: list[Contract]) -> Iterator[tuple[str, ...]]:
    """A row for each set of variants that agree in a dtype."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for contract in contracts:
        for dtype, bound in contract.values.items():
            gradient = contract.gradients.get(dtype)
            key = (
                dtype,
                f"{bound.element:g}, {bound.norm:g}",
                f"{gradient.element:g}, {gradient.norm:g}" if gradient else "-",
            )
            said.setdefault(key, []).append(contract.variant)
    for key, variants in said.items():
        yield ("all" if len(variants) == len(contracts) else ", ".join(f"`{name}`" for name in variants), *key)
