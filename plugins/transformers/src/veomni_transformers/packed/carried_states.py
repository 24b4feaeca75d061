"""Which layers carry something along the sequence beside attention, as their parameters and their code show.

Recurrent layers and short convolutions keep in a cache what the next token needs of those before it. A layer that does
so mixes packed sequences in training too, whether it is made of modules that a site knows, or of code of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from veomni_core.sites.walk import named_modules
from veomni_transformers.proving.functions import code_layers

# Mixers with a state that runs along the sequence have a parameter of this name: Mamba's, gated delta rules, Kimi's.
_DECAY = "A_log"
# The methods of transformers' caches that take what a layer carries.
_RECURRENT, _CONVOLVED = "update_recurrent_state", "update_conv_state"


def carries_state(module: nn.Module) -> bool:
    """Whether a recurrence runs along the sequence in ``module`` itself.

    Example:
        >>> from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
        >>> carries_state(Lfm2ShortConv.__new__(Lfm2ShortConv)), carries_state(nn.Linear(2, 2))
        (False, False)
    """
    return _has_decay(module) or _RECURRENT in _names(type(module))


def carries_inputs(module: nn.Module) -> bool:
    """Whether ``module`` itself reads its inputs at earlier positions, as short convolutions do.

    Example:
        >>> from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
        >>> carries_inputs(Lfm2ShortConv.__new__(Lfm2ShortConv)), carries_inputs(nn.Linear(2, 2))
        (True, False)
    """
    return _CONVOLVED in _names(type(module))


def carrying_paths(model: nn.Module) -> list[str]:
    """The paths of the modules in ``model`` that carry a state or inputs; each class's code is read once."""
    modules = named_modules(model)
    kinds = {type(module) for _, module in modules}
    carrying = {kind for kind in kinds if not _names(kind).isdisjoint((_RECURRENT, _CONVOLVED))}
    return [path for path, module in modules if type(module) in carrying or _has_decay(module)]


def _has_decay(module: nn.Module) -> bool:
    return _DECAY in vars(module).get("_parameters", {})


def _names(kind: type) -> frozenset[str]:
    """What the methods of a class name in their code, those of decorators around them too."""
    return frozenset(_named_in(kind))


def _named_in(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        if each is nn.Module:
            return
        for value in vars(each).values():
            for layer in code_layers(value):
                yield from layer.__code__.co_names
