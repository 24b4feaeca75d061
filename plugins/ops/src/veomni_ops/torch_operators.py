"""Operators of PyTorch for kernels: ``torch.compile`` doesn't trace into one. An eager call goes around the dispatcher.

That takes 10 microseconds of a call among others, a twelfth of both passes of rms_norm; 20 with a list of 48 tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.autograd import profiler

_PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
# By a schema's types, those that the dispatcher passes unchanged. It converts others, such as an int for a float.
_AS_IT_IS = {"Tensor": _PLAIN, "List[Tensor]": (list, tuple), **dict.fromkeys(("List[bool]", "List[str]"), (list,))}
_AS_IT_IS |= {each.__name__: (each,) for each in (bool, float, int, str)}
# What the dispatcher heeds in a thread, under inference_mode and without. Modes, traces and vmap add theirs.
_INFERENCE = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_USUAL = (_INFERENCE.add(torch._C.DispatchKey.ADInplaceOrView), _INFERENCE)
_LIBRARIES: dict[tuple[str, str], library.Library] = {}  # An operator lasts as long as its library.


def operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define an operator without autograd, through a ``Library``: ``custom_op`` puts more Python around each call.

    Args:
        schema: ``namespace::name(arguments) -> results``.
        function: computes it.
        fake: makes tensors like its results, without computing.

    Returns:
        Calls the operator; or ``function`` itself, where plain tensors come and nothing traces or profiles operators.

    Example:
        >>> doubled = operator("an_example::doubled(Tensor x) -> Tensor", lambda x: 2 * x, torch.empty_like)
        >>> doubled(torch.ones(2)), torch.ops.an_example.doubled(torch.ones(2))
        (tensor([2., 2.]), tensor([2., 2.]))
    """
    namespace, _, rest = schema.partition("::")
    key = function.__module__, schema
    _LIBRARIES.pop(key, None)  # of a module that is loaded again
    operators = _LIBRARIES[key] = library.Library(namespace, "FRAGMENT")
    name = operators.define(rest)
    operators.impl(name, function, "CompositeExplicitAutograd")
    library.register_fake(f"{namespace}::{name}", fake, lib=operators)
    overload = getattr(getattr(torch.ops, namespace), name).default
    expected = [_types(str(argument.type)) for argument in overload._schema.arguments]
    lists = [place for place, types in enumerate(expected) if tuple in types]
    alone = [place for place, types in enumerate(expected) if Tensor in types]
    accepted: set[tuple[type, ...]] = set()

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _is_watched():
            return overload(*args)
        found = tuple(map(type, args))
        if found not in accepted:
            if not all(each in types for each, types in zip(found, expected, strict=True)):
                return overload(*args)
            accepted.add(found)
        tensors = [x for place in alone if (x := args[place]) is not None] + [x for each in lists for x in args[each]]
        # Not without data, nor of the opposite sign of what memory holds, as the imaginary part of a conjugate is.
        if tensors[0].is_meta or any(map(Tensor.is_neg, tensors)) or not {*map(type, tensors)}.issubset(_PLAIN):
            return overload(*args)
        return function(*args)

    return call


def _is_watched() -> bool:
    """Whether a mode, a trace, a transform such as vmap, or a profiler is to see the operator."""
    is_profiled = profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()  # with all threads, or this
    # A default device is a mode too, that of functions: to it the operator is one call, and what it calls are many.
    has_modes = torch._C._len_torch_function_stack() or torch._C._dispatch_tls_local_include_set() not in _USUAL
    return bool(is_profiled or has_modes)


def _types(name: str) -> tuple[type, ...]:
    if name.startswith("Optional["):
        return *_types(name[len("Optional[") : -1]), type(None)
    return _AS_IT_IS.get(name, ())
