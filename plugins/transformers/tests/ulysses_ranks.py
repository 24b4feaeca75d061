"""Checks for every rank of a group, which test_ulysses.py starts; each compares with one rank, in float64."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def run(names: Collection[str]) -> None:
    """Print each check's name and what ranks failed with, on the first rank; ranks stay together between checks."""
    for name in names:
        torch.manual_seed(0)
        try:
            CHECKS[name]()
            outcome = ""
        except (Exception, pytest.fail.Exception):  # the second is no Exception
            outcome = traceback.format_exc()
        outcomes: list[Any] = [None] * size()
        distributed.all_gather_object(outcomes, outcome)
        if rank() == 0:
            print(repr((name, "\n".join(f"rank {r}: {text}" for r, text in enumerate(outcomes) if text))), flush=True)


def rank() -> int:
    return distributed.get_rank()


def size() -> int:
    return distributed.get_world_size()


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def equal(found: Tensor, wanted: Tensor, what: str = "") -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    """As far as models compute in float32 whatever their dtype: norms, routers and the loss."""
    atol = 1e-9 if wanted.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=atol, msg=lambda text: f"{what}: {text}")


def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()
