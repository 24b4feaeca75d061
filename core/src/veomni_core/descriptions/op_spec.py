"""What plugins and the core describe of an op: its variants, its config field and its contracts. Imports no torch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from veomni_core.descriptions.field_types import check_fields
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.errors import SpecError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """A computation for which kernels can be plugged in. Its arguments are given by keyword.

    Args:
        name: the op's name, as ``rms_norm``.
        variants: the names of its variants. Each has exactly one mathematical definition.
        config_field: its key under the job's ``model.ops_implementation``.
        default: the value of that key under ``preset: gpu``.
        contract: ``"module:attribute"`` of a mapping from variant to :class:`veomni_ops.contract.Contract`.
            Imported only when a kernel is checked or a site is proven.
        description: one line for ``veomni list``.
        variant_aliases: other names of variants.
        published: known kernel names, each with the distribution that provides it (empty: none does yet). With these, a
            kernel that is not installed can be told apart from a misspelt name.
        legacy_values: old kernel names, each with the present one.
        follows_autocast: whether under ``torch.autocast`` the op computes in autocast's dtype, whatever the dtype of
            its weights. True if it multiplies matrices, or if all its inputs come from matrix products.
        on_request: whether only code that asks for the op calls it, and no model's forward by itself. No preset fills
            its field then, and a plan has the op only where the config writes the field.
        reads_boundaries: whether its sites mix positions unless they are told where packed sequences begin, by an
            argument ``seq_idx`` or ``cu_seq_lens_q``. A bound model tells them, and refuses packed sequences where a
            site stays eager.
        added: the contracts of variants that plugins added, each as ``"module:attribute"``, by the variant's name. The
            registry fills it in.

    Example:
        >>> gelu = OpSpec(
        ...     name="gelu",
        ...     variants=("tanh",),
        ...     config_field="gelu_implementation",
        ...     contract="acme_gelu.contract:CONTRACTS",
        ...     variant_aliases={"new": "tanh"},
        ... )
        >>> gelu.default, gelu.canonical_variant("new")
        ('eager', 'tanh')
    """

    name: str
    variants: tuple[str, ...]
    config_field: str
    default: str = EAGER
    contract: str = ""
    description: str = ""
    variant_aliases: Mapping[str, str] = field(default_factory=dict, hash=False)
    published: Mapping[str, str] = field(default_factory=dict, hash=False)
    legacy_values: Mapping[str, str] = field(default_factory=dict, hash=False)
    follows_autocast: bool = False
    on_request: bool = False
    reads_boundaries: bool = False
    added: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        owner = f"OpSpec {self.name!r}"
        check_fields(self, owner, names=("name", "config_field", "default"), references=("contract",))
        if not self.variants:
            raise SpecError(f"{owner}: variants is empty; list at least one")
        for alias, variant in self.variant_aliases.items():
            if variant not in self.variants:
                raise SpecError(
                    f"{owner}: variant_aliases[{alias!r}] is {variant!r}, which is not one of its variants. "
                    f"{did_you_mean(variant, self.variants)}"
                )

    def canonical_variant(self, variant: str) -> str:
        """``variant`` with an alias resolved."""
        return self.variant_aliases.get(variant, variant)


def _by_keyword(init: Any) -> Any:
    @functools.wraps(init)
    def by_keyword(self: OpSpec, *args: Any, **fields: Any) -> None:
        if args:
            advice = "write OpSpec(name=..., variants=..., ...); positional arguments end with the next minor release"
            warnings.warn(f"OpSpec takes its arguments by keyword: {advice}", FutureWarning, stacklevel=2)
        init(self, **dict(zip(OpSpec.__dataclass_fields__, args, strict=False)), **fields)

    return by_keyword


OpSpec.__init__ = _by_keyword(OpSpec.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class VariantSpec:
    """A variant of an op that another distribution defines.

    Args:
        op_name: the op.
        name: the variant's name among the op's.
        contract: ``"module:attribute"`` of its :class:`veomni_ops.contract.Contract`, which has the call signature
            of the op's other contracts. Imported only when a kernel is checked or a site is compared.

    Example:
        >>> str(VariantSpec("swiglu_mlp", "relu_squared", contract="acme_mlp.contract:CONTRACT"))
        'swiglu_mlp/relu_squared'
    """

    op_name: str
    name: str
    contract: str

    def __post_init__(self) -> None:
        check_fields(self, f"VariantSpec {self}", names=("op_name", "name"), references=("contract",))

    def __str__(self) -> str:
        return f"{self.op_name}/{self.name}"
