"""``PatchConfig``: what is changed in one modeling file. Patches are declared by decorators, or by calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from veomni_patchgen.errors import PatchError

REPLACE_CLASS, REPLACE_FUNCTION, OVERRIDE, MODIFY = (
    "replace_class",
    "replace_function",
    "override_method",
    "modify_method",
)


@dataclass(frozen=True)
class External:
    """A class or function of another module, which the generated file imports."""

    module: str
    name: str


@dataclass(frozen=True)
class Patch:
    """One change.

    Attributes:
        kind: ``replace_class``, ``replace_function``, ``override_method`` or ``modify_method``.
        target: the class, the function, or ``Class.method`` that is changed.
        replacement: the code that is put there; its source is read.
        description: why, for the marker in the generated file.
        name_map: prefixes of the replacement's names, and what they become.
        declares: how the model computes something else than upstream's, and why; empty if it does not.
        new: whether the method is one that upstream does not have.
    """

    kind: str
    target: str
    replacement: Any
    description: str = ""
    name_map: Mapping[str, str] = field(default_factory=dict)
    declares: str = ""
    new: bool = False

    @property
    def title(self) -> str:
        """The patch's name in messages: its kind and its target."""
        return f"{self.kind} {self.target}"


@dataclass(frozen=True)
class AddedImport:
    """``from module import names``, or ``import module as alias``."""

    module: str
    names: tuple[tuple[str, str | None], ...] = ()
    alias: str | None = None
    owner: str = ""


def create_patch_from_external(target: str, source_module: str, source_name: str, description: str = "") -> Patch:
    """A patch that replaces a class by one of another library, which is imported. Append it to ``config.patches``.

    Args:
        target: the class (or function) upstream.
        source_module: where the other one is.
        source_name: its name there.
        description: why.

    Example:
        >>> create_patch_from_external("Qwen3RMSNorm", "torch.nn", "RMSNorm").title
        'replace_class Qwen3RMSNorm'
    """
    return Patch(REPLACE_CLASS, target, External(source_module, source_name), description)


class PatchConfig:
    """The patches of one modeling file.

    Args:
        source_module: the modeling module, such as ``transformers.models.qwen3.modeling_qwen3``.
        target_file: the name of the file that is written.
        description: what the patches are for.
        inherits: a config whose patches this one has too. A patch of this one takes the place of the inherited patch
            with the same target.

    Attributes:
        patches: the patches, in the order in which they were declared.
        additional_imports: what ``add_import`` has added.
        post_import_blocks: what ``add_post_import_block`` has added.
        helpers: what ``add_helper`` has added.
        dropped_imports: what ``drop_import_names`` has named.
        excluded: what ``exclude_from_output`` has named.
        make_example: what ``example`` has declared.

    Example:
        >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
        >>> @config.override_method("LlamaMLP.forward", description="as one op")
        ... def forward(self, x):
        ...     return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        >>> [patch.title for patch in config.patches]
        ['override_method LlamaMLP.forward']
    """

    def __init__(
        self, source_module: str, target_file: str, description: str = "", inherits: PatchConfig | None = None
    ) -> None:
        if not isinstance(source_module, str) or not (inherits is None or isinstance(inherits, PatchConfig)):
            raise PatchError("PatchConfig(source_module=...) is a module's dotted name, and inherits= a PatchConfig")
        if not re.fullmatch(r"[\w.-]+\.py", str(target_file)):
            raise PatchError(
                f"PatchConfig(target_file={target_file!r}): write a file's name, such as 'patched_modeling_qwen3.py'; "
                "veomni patchgen -o names the folder"
            )
        self.source_module, self.target_file, self.description = source_module, target_file, description
        self.inherits = inherits
        self.patches: list[Patch] = []
        self.additional_imports: list[AddedImport] = list(inherits.additional_imports) if inherits else []
        self.post_import_blocks: list[str] = list(inherits.post_import_blocks) if inherits else []
        self.helpers: list[Any] = list(inherits.helpers) if inherits else []
        self.dropped_imports: list[str] = list(inherits.dropped_imports) if inherits else []
        self.excluded: list[str] = list(inherits.excluded) if inherits else []
        self.make_example: Any = inherits.make_example if inherits else None

    def all_patches(self) -> tuple[Patch, ...]:
        """This config's patches, after the inherited ones that it doesn't replace.

        Raises:
            PatchError: two of its own patches have the same target, or it inherits itself.
        """
        above = list[PatchConfig]()
        while (each := above[-1].inherits if above else self.inherits) is not None:
            if each is self or each in above:
                raise PatchError(f"{self.target_file}: its config inherits itself")
            above.append(each)
        own: dict[str, Patch] = {}
        for patch in self.patches:
            if patch.target in own:
                raise PatchError(
                    f"{self.target_file}: {own[patch.target].title} and {patch.title} have the same target. Join them, "
                    "or inherit the other config (PatchConfig(inherits=...)), whose patches this one's replace"
                )
            own[patch.target] = patch
        inherited = self.inherits.all_patches() if self.inherits else ()
        return (*(patch for patch in inherited if patch.target not in own), *own.values())

    def replace_class(self, target: str, **options: Any) -> Any:
        """Put the decorated class in place of ``target``, with the decorators that it has itself."""
        return self._patch(REPLACE_CLASS, target, options)

    def replace_function(self, target: str, **options: Any) -> Any:
        """Put the decorated function in place of ``target``, with the decorators that it has itself."""
        return self._patch(REPLACE_FUNCTION, target, options)

    def override_method(self, target: str, **options: Any) -> Any:
        """Put the decorated function in place of the method ``Class.method``, whose decorators stay.

        An inherited method is overridden in ``Class`` alone. Decorators of the function take the place of upstream's.

        Args:
            target: ``Class.method``.
            options: ``description``; ``replacement`` (the function, where this is no decorator); ``name_map``;
                ``declares``; ``new=True`` for a method that upstream does not have.
        """
        return self._patch(OVERRIDE, target, options)

    def modify_method(self, target: str, **options: Any) -> Any:
        """Put the decorated function around the method ``Class.method``, which it gets as its first argument.

        Upstream's code is not repeated in the patch: it stays in the generated file under another name.
        """
        return self._patch(MODIFY, target, options)

    def modify_init(self, target: str, **options: Any) -> Any:
        """Put the decorated function ``(original_init, self, ...)`` around the ``__init__`` of the class ``target``."""
        return self._patch(MODIFY, f"{target}.__init__", options)

    def add_import(
        self,
        module: str,
        names: Iterable[str | tuple[str, str]] | None = None,
        alias: str | None = None,
        is_from_import: bool = True,
    ) -> None:
        """Import ``names`` from ``module``; without names, or with ``is_from_import=False``, the module itself."""
        listed: list[tuple[str, str | None]] = [
            (each, None) if isinstance(each, str) else (each[0], each[1]) for each in names or ()
        ]
        if is_from_import and listed:
            if alias is not None:
                if len(listed) > 1:
                    raise PatchError(f"add_import({module!r}): an alias is that of one name, not of {len(listed)}")
                listed = [(listed[0][0], alias)]
            self.additional_imports.append(AddedImport(module, tuple(listed), owner=self.target_file))
        else:
            self.additional_imports.append(AddedImport(module, alias=alias, owner=self.target_file))

    def add_post_import_block(self, code: str) -> None:
        """Put ``code`` after the imports."""
        self.post_import_blocks.append(code)

    def add_helper(self, helper: Callable[..., Any] | type) -> Any:
        """Put a function or class of the patches' module into the file; usable as a decorator.

        Those that a patch calls come along without it.
        """
        self.helpers.append(helper)
        return helper

    def drop_import_names(self, *names: str) -> None:
        """Leave out upstream's imports of ``names``."""
        self.dropped_imports.extend(names)

    def exclude_from_output(self, *names: str) -> None:
        """Leave out upstream's classes or functions ``names``, and what nothing but they used."""
        self.excluded.extend(names)

    def example(self, make: Callable[[], tuple[Any, Mapping[str, Any]]]) -> Any:
        """Declare a tiny model for the proof: ``make()`` gives its config, and the inputs of a step with ``labels``.

        The config is one of transformers', or a mapping with ``model_type``.
        """
        self.make_example = make
        return make

    def _patch(self, kind: str, target: str, options: dict[str, Any]) -> Any:
        replacement = options.pop("replacement", None)
        if unknown := set(options) - {"description", "name_map", "declares", "new"}:
            raise PatchError(f"{kind} {target}: there is no option {', '.join(sorted(unknown))}")
        if (kind in (OVERRIDE, MODIFY)) != (target.count(".") == 1):
            wanted = "Class.method" if kind in (OVERRIDE, MODIFY) else "a class or function of the module"
            raise PatchError(f"{kind}: {target!r} is no target of it, which is {wanted}")

        given = {name: value for name, value in options.items() if value is not None}

        def declare(function: Any) -> Any:
            self.patches.append(Patch(kind, target, function, **given))
            return function

        return declare if replacement is None else declare(replacement)
