"""The smallest found set of model types whose sites run every distinct code that any causal type's sites run.

Modeling files repeat each other: 157 types have far fewer kinds of norms, rotations and experts. ``make test`` binds
the types of :data:`DISTINCT`; ``make test-all`` binds all of them, and checks that the list still covers the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from torch import nn

from veomni_core import Site
from veomni_core.sites.find import find_sites
from veomni_transformers.proving.functions import global_functions
from veomni_transformers.proving.reachable_code import is_library, reached_functions

DISTINCT = (
    *("aria_text", "bailing_hybrid", "beam", "cohere", "deepseek_v4", "diffllama", "doge", "ernie4_5"),
    *("falcon_mamba", "gemma", "glm", "gpt_oss", "granitemoehybrid", "helium", "hy_v4", "inkling2_text"),
    *("inkling_text", "jamba", "jetmoe", "kimi_linear", "lfm3", "llama4", "longcat_flash", "mamba"),
    *("minimax_m3_vl_text", "modernbert-decoder", "moshi", "nanochat", "olmo_hybrid", "phi3"),
    *("qwen3_5_moe", "qwen3_next", "recurrent_gemma", "seed_oss", "xlstm", "zamba"),
)
_NOT_COUNTED = ("attention", "cross_entropy_loss", "dsa_attention", "dsa_indexer", "linear", "token_logprobs")
Code = tuple[str, str, str]  # rule, variant, digest of the code


def codes(model: nn.Module) -> frozenset[Code]:
    """The distinct code of the sites of ``model`` that are proven, by rule and variant.

    Attention, sparse too, and linear modules don't count, which stay eager where the types are bound. Nor do losses:
    nearly each type writes its own head, and all are proven by one comparison of two losses.
    """
    found = set()
    for site in find_sites(model):
        if site.variant is not None and site.op_name not in _NOT_COUNTED:
            found.add((site.rule, site.variant, _digest(*_own_code(model, site))))
    return frozenset(found)


def _own_code(model: nn.Module, site: Site) -> tuple[Any, type | None]:
    """The function that the site names, or its module's forward and the class whose methods that calls."""
    kind = type(model.get_submodule(site.path))
    if "function" in site.detail:
        return dict(global_functions(kind.forward))[site.detail["function"]], None
    return kind.forward, kind


def cover(codes_by_type: Mapping[str, frozenset[Code]]) -> list[str]:
    """Types that together have every code, each the one that adds most to those before it; sorted by name."""
    missing = set().union(*codes_by_type.values())
    chosen = []
    while missing:
        best = max(sorted(codes_by_type), key=lambda name: len(codes_by_type[name] & missing))
        chosen.append(best)
        missing -= codes_by_type[best]
    return sorted(chosen)


def _digest(function: Any, kind: type | None) -> str:
    texts = sorted(
        repr(list(_content(reached.__code__)))
        for reached in reached_functions([function], kind)
        if not is_library(reached)
    )
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def _content(code: CodeType) -> Iterator[Any]:
    """What a code object computes, without its place in a file and the texts of its messages."""
    yield code.co_code
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _content(constant)
        elif not isinstance(constant, str) or constant.isidentifier():
            yield constant
