"""load_balancing_loss: Switch Transformers' auxiliary loss (Fedus et al. 2021, equations 4 to 6).

``(gate_logits: tuple of [T, E], num_experts, top_k, attention_mask[B, S] or None) -> scalar`` in float32, with the
value and the gradient of transformers' ``load_balancing_loss_func``. The other variants are the other functions of that
name in transformers, each with its own arguments. Variants that take a tuple of logits return the number 0, as
transformers does, if they get no tuple (``None``: the model collected no router logits), and also for an empty one (no
layer has a router), for which a bound model raises an error.

A site's ``sizes``: ``experts``, and ``top_k``, how many a token is routed to; empty where the model states none. Its
dtype is that of the model's weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.combinations import together
from veomni_ops.contract import Contract, Draw, Sample, compute_dtype, leaf, tolerances


def standard(
    gate_logits: tuple[Tensor, ...] | None, num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor | int:
    """``E * sum over experts of (routes to the expert per token) * (mean probability of the expert)``.

    Both are means over the tokens of all layers. Tokens with a 0 in ``attention_mask`` are left out of both.
    Probabilities are rounded to the logits' dtype; sums are in float32. The gradient reaches the logits through the
    probabilities only. The result is 0 if there are no logits.

    Args:
        gate_logits: the router's logits of each layer, ``[T, E]``, of any floating dtype.
        num_experts: E.
        top_k: how many experts a token is routed to.
        attention_mask: ``[B, S]`` with ``B * S = T``; 0 at padding.

    Returns:
        A scalar, in float32 (float64 for float64 logits); the number 0 if there are no logits.

    Example:
        >>> each_its_own = 9.0 * torch.eye(4)  # token i prefers expert i
        >>> standard((each_its_own,), num_experts=4, top_k=1)
        tensor(1.)
        >>> all_the_first = each_its_own[:1].expand(4, 4)
        >>> standard((all_the_first,), num_experts=4, top_k=1)
        tensor(3.9985)
        >>> padding = torch.tensor([[1, 1, 1, 0]])
        >>> standard((each_its_own,), num_experts=4, top_k=1, attention_mask=padding)  # the last expert gets nothing
        tensor(1.3332)
        >>> standard(None, num_experts=4)
        0
    """
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return 0
    dtype = compute_dtype(gate_logits[0])
    routes = torch.zeros(num_experts, dtype=dtype, device=gate_logits[0].device)
    probability = torch.zeros_like(routes)
    tokens = torch.zeros((), dtype=dtype, device=routes.device)
    for logits in gate_logits:
        probabilities = F.softmax(logits, dim=-1)
        chosen = F.one_hot(probabilities.topk(top_k, dim=-1).indices, num_experts).sum(dim=1).to(dtype)
        counts = torch.ones(len(logits), dtype=dtype, device=routes.device)
        if attention_mask is not None:
            counts = attention_mask.reshape(-1).to(counts)
        routes = routes + (chosen * counts[:, None]).sum(dim=0)
        probability = probability + (probabilities.to(dtype) * counts[:, None]).sum(dim=0)
        tokens = tokens + counts.sum()
    return num_experts * ((routes / tokens) * (probability / tokens)).sum()


def given_routes(router_probs: Tensor, expert_indices: Tensor) -> Tensor:
    """``E² * mean over batch and experts of (share of tokens routed) * (mean probability)`` (Switch Transformers).

    Takes probabilities ``[B, S, E]`` and the chosen experts, ``[B, S]`` or ``[B, S, K]``. If a token chose an expert
    twice, it counts once.

    Args:
        router_probs: ``[B, S, E]``, of any floating dtype.
        expert_indices: integers ``[B, S]`` or ``[B, S, K]``.

    Returns:
        A scalar, in float32 (float64 for float64 probabilities).

    Example:
        >>> each_its_own = (9.0 * torch.eye(4)).softmax(dim=-1)[None]  # one batch; token i prefers expert i
        >>> given_routes(each_its_own, expert_indices=torch.tensor([[0, 1, 2, 3]]))
        tensor(1.)
        >>> given_routes(each_its_own[:, :1].expand(1, 4, 4), expert_indices=torch.tensor([[0, 0, 0, 0]]))
        tensor(3.9985)
    """
    experts = router_probs.shape[-1]
    chosen = expert_indices.long().reshape(*router_probs.shape[:2], -1)
    routed = F.one_hot(chosen, experts).amax(dim=-2).to(compute_dtype(router_probs))
    return (routed.mean(dim=-2) * router_probs.mean(dim=-2)).mean() * experts**2


def product_keys(
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int,
    num_keys: int,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | float:
    """:func:`standard` for experts that are pairs of keys (Doge), divided by ``top_k``.

    A layer's logits ``[2, T, num_keys]`` score the first and the second key. The score of a pair is the sum of both.

    Args:
        gate_logits: the logits of each layer, ``[2, T, num_keys]``, of any floating dtype.
        num_experts: the number of pairs, ``num_keys ** 2``.
        num_keys: how many first keys, and how many second keys, there are.
        top_k: how many experts a token is routed to.
        attention_mask: ``[B, S]`` with ``B * S = T``; 0 at padding.

    Returns:
        A scalar, in float32 (float64 for float64 logits); the number 0 if there are no logits.

    Example:
        >>> key = 9.0 * torch.eye(2)
        >>> each_its_own = torch.stack((key[[0, 0, 1, 1]], key[[0, 1, 0, 1]]))  # four tokens, four pairs
        >>> product_keys((each_its_own,), num_experts=4, num_keys=2, top_k=1)
        tensor(1.)
        >>> all_the_first = each_its_own[:, :1].expand(2, 4, 2)
        >>> product_keys((all_the_first,), num_experts=4, num_keys=2, top_k=1)
        tensor(3.9990)
    """
    if not isinstance(gate_logits, tuple):
        return 0
    scores = tuple((first[:, :, None] + second[:, None, :]).flatten(1) for first, second in gate_logits)
    return standard(scores, num_experts, top_k, attention_mask) / top_k


def _logits(draw: Draw, layers: int, tokens: int, experts: int, skew: float = 0.0) -> tuple[Tensor, ...]:
    # Per token a permutation of well-separated levels: with ties, or differences that rounding removes, the top k would
    # be ambiguous. Over many tokens, balanced routes give gradients close to zero; `skew` makes them larger.
    levels = torch.linspace(-3.0, 3.0, experts, dtype=torch.float64, device=draw.device)
    shift = skew * torch.linspace(-1.0, 1.0, experts, dtype=torch.float64, device=draw.device)
    shifts = [(draw.normal(tokens, experts).double() + shift).argsort(dim=-1).argsort(dim=-1) for _ in range(layers)]
    return tuple(leaf(levels[order].to(draw.dtype)) for order in shifts)


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    logits = functools.partial(_logits, Draw(device, dtype), skew=1.0)
    yield Sample("five layers of 128 experts", (logits(5, 290, 128), 128, 8))
    mask = torch.ones(4, 150, dtype=torch.long, device=device)
    mask[1, 100:], mask[3, 7:] = 0, 0
    yield Sample("six layers and a long mask", (logits(6, 600, 16), 16, 4, mask))
    yield Sample("33 layers", (logits(33, 11, 8), 8, 2))
    # The last ones get no token.
    few = _logits(Draw(device, dtype, seed=1), 2, 97, 300, skew=-4.0)
    yield Sample("300 experts, many of them empty", (few, 300, 12))

    def make(layers: int, shape: tuple[int, int], experts: int, top_k: int, mask: torch.dtype | None) -> Sample:
        batch, length = shape
        kept = torch.arange(length, device=device) < torch.tensor([[length // 2], [length], [0]], device=device)[:batch]
        drawn = _logits(Draw(device, dtype, seed=8), layers, batch * length, experts, skew=1.0)
        return Sample("", (drawn, experts, top_k, None if mask is None else kept.to(mask)))

    shapes = {"layers": (1, 2, 7), "shape": ((1, 7), (2, 33), (3, 64)), "experts": (12, 96, 160), "top_k": (1, 2, 9)}
    yield from together(make, **shapes, mask=(None, torch.int64, torch.bool, torch.float32))
    yield Sample("22 of 128 experts", (_logits(Draw(device, dtype, seed=2), 1, 33, 128, skew=1.0), 128, 22))
    shared = (torch.arange(1000, device=device) < 700).long().expand(2, -1)
    call = (_logits(Draw(device, dtype, seed=9), 1, 2000, 16, skew=1.0), 16, 4, shared)
    yield Sample("2000 tokens, a mask that both rows share", call, values_only=True)


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    logits = functools.partial(_logits, Draw(device, dtype), skew=1.0)
    yield Sample("48 layers", (logits(48, 257, 128), 128, 8))
    if dtype != torch.float16:  # where the gradients would be subnormal
        yield Sample("past 65535 tokens", (logits(2, 65_539, 64), 64, 4))


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    logits = functools.partial(_logits, Draw(device, dtype))

    yield Sample("odd sizes", (logits(3, 21, 7), 7, 2))
    yield Sample("one layer, top 1", (logits(1, 16, 4), 4, 1))
    yield Sample("many experts", (logits(2, 30, 64), 64, 8))
    mask = torch.ones(3, 8, dtype=torch.long, device=device)
    mask[0, 5:], mask[2, 1:] = 0, 0
    yield Sample("a mask", (logits(2, 24, 8), 8, 2, mask))
    yield Sample("a mask that keeps all", (logits(2, 24, 8), 8, 2, torch.ones(3, 8, device=device)))
    strided = tuple(leaf(each.detach().repeat_interleave(2, dim=1)[:, ::2]) for each in logits(2, 18, 6))
    yield Sample("logits with a stride", (strided, 6, 2))
    transposed = tuple(leaf(each.detach().t().contiguous().t()) for each in logits(2, 16, 8))
    yield Sample("transposed logits and a mask", (transposed, 8, 2, mask[:2]))
    yield from _edges(device, dtype)


def _edges(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Other masks of an earlier sample's shape, and a single layer with top 1 and a mask."""
    logits = functools.partial(_logits, Draw(device, dtype, seed=3))
    mask = torch.ones(3, 8, dtype=torch.long, device=device)
    mask[1, 2:], mask[2, :5] = 0, 0
    holes = mask.clone()
    holes[0, 1:7:2] = 0
    for name, args in (
        ("padding on the left, in floats", (logits(2, 24, 8), 8, 2, mask.float())),
        ("a boolean mask with holes", (logits(2, 24, 8), 8, 2, holes.bool())),
        ("one layer and a mask, top 1", (logits(1, 24, 8), 8, 1, mask)),
        ("every expert but one", (logits(2, 12, 4), 4, 3)),
    ):
        yield Sample(name, args, values_only=True)
    yield Sample("top_k left to its default", (logits(2, 16, 8), 8), values_only=True)
    padded = torch.ones(5, 13, dtype=torch.int32, device=device)
    padded[1, :9], padded[3] = 0, 0
    some = logits(3, 65, 16, skew=1.0)
    yield Sample("65 tokens, one sequence all padding", (some, 16, 9, padded), values_only=True)
    yield Sample("twelve of 64 experts, a mask", (logits(2, 65, 64, skew=1.0), 64, 12, padded), values_only=True)
    yield Sample("one expert", (logits(2, 9, 1), 1, 1), values_only=True)


VALUES = tolerances(float32=(4e-6, 4e-6), bfloat16=(1e-2, 1e-2), float16=(1.5e-3, 1.5e-3))
# In low precision transformers rounds the probabilities, and the gradient of softmax subtracts nearly equal numbers.
GRADIENTS = tolerances(float32=(1e-5, 4e-6), bfloat16=(1.5e-1, 6e-2), float16=(2e-2, 8e-3))


def _given_routes_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    for name, shape in (("odd sizes", (3, 7, 5)), ("one batch", (1, 33, 8)), ("one token", (2, 1, 4))):
        probabilities = leaf(draw.normal(*shape).softmax(dim=-1))
        yield Sample(name, (probabilities, draw.integers(shape[-1], *shape[:2])))
        yield Sample(f"{name}, two experts", (probabilities, draw.integers(shape[-1], *shape[:2], 2)))
    probabilities = leaf(draw.normal(2, 65, 16).softmax(dim=-1))
    chosen = draw.integers(9, 2, 65, 12)  # the last experts get no token
    yield Sample("twelve choices in int32, empty experts", (probabilities, chosen.int()), values_only=True)


def _keys(draw: Draw, layers: int, tokens: int, keys: int = 4) -> tuple[Tensor, ...]:
    # Sums of these levels are distinct in bfloat16 too, so that rounding doesn't choose among pairs.
    steps = torch.arange(keys, dtype=torch.float64, device=draw.device)
    levels = torch.stack([steps / keys, steps])
    orders = [draw.normal(2, tokens, keys).double().argsort(dim=-1) for _ in range(layers)]
    return tuple(
        leaf(torch.stack([level[o] for level, o in zip(levels, order, strict=True)]).to(draw.dtype)) for order in orders
    )


def _product_keys_beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    # Gradients shrink as tokens times layers grow: with twice as many they would be subnormal in float16.
    yield Sample("three layers of many tokens", (_keys(Draw(device, dtype), 3, 97), 16, 4, 3))
    yield Sample("one layer of many tokens", (_keys(Draw(device, dtype), 1, 291), 16, 4, 3))
    yield Sample("16 keys", (_keys(Draw(device, dtype), 1, 33, 16), 256, 16, 3))
    if dtype != torch.bfloat16:  # in which some of 1024 sums are equal
        yield Sample("32 keys", (_keys(Draw(device, dtype), 1, 33, 32), 1024, 32, 3))


def _given_routes_beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    probabilities = leaf(draw.normal(3, 129, 193).softmax(dim=-1))
    yield Sample("many tokens and experts", (probabilities, draw.integers(150, 3, 129, 9)))


def _product_keys_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    logits = functools.partial(_keys, Draw(device, dtype))
    yield Sample("odd sizes", (logits(3, 21), 16, 4, 2))
    yield Sample("one layer, top 1", (logits(1, 16), 16, 4, 1))
    mask = torch.ones(3, 8, dtype=torch.long, device=device)
    mask[0, 5:], mask[2, 1:] = 0, 0
    yield Sample("a mask", (logits(2, 24), 16, 4, 3, mask))
    yield Sample("65 tokens, nine choices", (logits(2, 65), 16, 4, 9), values_only=True)


CONTRACTS = {
    contract.variant: contract
    for contract in (
        Contract(
            op_name="load_balancing_loss",
            variant="standard",
            reference=standard,
            samples=_samples,
            values=VALUES,
            gradients=GRADIENTS,
            beyond_a_tile=_beyond_a_tile,
            large=_large,
        ),
        Contract(
            op_name="load_balancing_loss",
            variant="given_routes",
            reference=given_routes,
            samples=_given_routes_samples,
            values=VALUES,
            gradients=GRADIENTS,
            beyond_a_tile=_given_routes_beyond_a_tile,
        ),
        Contract(
            op_name="load_balancing_loss",
            variant="product_keys",
            reference=product_keys,
            samples=_product_keys_samples,
            values=VALUES,
            gradients=GRADIENTS,
            beyond_a_tile=_product_keys_beyond_a_tile,
        ),
    )
}
