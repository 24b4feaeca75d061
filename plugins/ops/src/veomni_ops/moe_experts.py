"""moe_experts: the experts of a mixture-of-experts layer, after routing.

``(hidden[T, H], top_k_index[T, K], top_k_weights[T, K], gate_up_proj[E, 2I, H], down_proj[E, H, I]) -> [T, H]``

``T`` tokens, ``K`` choices per token (int64 indices), ``E`` experts, ``H`` hidden and ``I`` intermediate size.

``clamped`` takes ``(…, gate_up_bias[E, 2I] or None, down_bias[E, H] or None, alpha, limit, interleaved, up_offset)``.
Weights may be transposed views. A site's ``sizes``: ``experts`` (E), ``hidden`` (H) and ``intermediate`` (I).

A kernel declares in :attr:`~veomni_core.KernelSpec.features` whether it has the feature ``lora``. Both variants then
take ``gate_up_lora`` and ``down_lora``: for a projection ``[E, out, in]`` the adapter
``(a[E, r, in], b[E, out, r], scaling)``, which is multiplied beside it. A kernel without the feature must raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.combinations import CONTIGUOUS, EVERY_OTHER, LAYOUTS, TRANSPOSED, laid_out, together
from veomni_ops.contract import Contract, Draw, Sample, SampleMaker, compute_dtype, leaf, tolerances
from veomni_ops.lora_samples import LORA, Adapter, adapter, with_adapters
from veomni_ops.memory_places import far_apart, has_room


def standard(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_lora: Adapter | None = None,
    down_lora: Adapter | None = None,
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``, gate before up in ``gate_up_proj``.

    An index outside ``[0, E)`` is dropped: expert parallelism marks tokens of other ranks in that way. A row may name
    an expert twice. The sum over experts is accumulated in float32 and rounded to hidden's dtype at the end. Gradients
    reach ``hidden``, ``top_k_weights``, both projections and the adapters; they are zero for experts without tokens.

    Args:
        hidden: the tokens ``[T, H]``, of any floating dtype.
        top_k_index: the experts of each token, int64 ``[T, K]``.
        top_k_weights: their routing weights ``[T, K]``, in any floating dtype.
        gate_up_proj: ``[E, 2I, H]``, in hidden's dtype.
        down_proj: ``[E, H, I]``, in hidden's dtype.
        gate_up_lora: ``(a[E, r, H], b[E, 2I, r], scaling)`` in hidden's dtype, for ``gate_up_proj + scaling * b @ a``.
        down_lora: ``(a[E, r, I], b[E, H, r], scaling)``, which may have another rank ``r``.

    Returns:
        ``[T, H]`` in hidden's dtype.

    Example:
        >>> hidden = torch.ones(2, 1)
        >>> gate_up = torch.ones(2, 2, 1)  # both experts compute silu(1) * 1 = 0.7311
        >>> down = torch.tensor([1.0, 10.0]).view(2, 1, 1)  # the second one's result is ten times as large
        >>> index = torch.tensor([[0, 1], [1, 2]])  # there is no expert 2: the choice is dropped
        >>> weights = torch.tensor([[0.5, 0.5], [1.0, 1.0]])
        >>> standard(hidden, index, weights, gate_up, down)
        tensor([[4.0208],
                [7.3106]])
    """
    result = torch.zeros_like(hidden, dtype=compute_dtype(hidden))
    for expert in range(gate_up_proj.shape[0]):
        token, position = torch.where(top_k_index == expert)
        gate, up = _linear(hidden[token], gate_up_proj, None, gate_up_lora, expert).chunk(2, dim=-1)
        output = _linear(F.silu(gate) * up, down_proj, None, down_lora, expert)
        weighted = output.to(result.dtype) * top_k_weights[token, position, None].to(result.dtype)
        result = result.index_add(0, token, weighted)
    return result.to(hidden.dtype)


def clamped(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = False,
    up_offset: float = 1.0,
    gate_up_lora: Adapter | None = None,
    down_lora: Adapter | None = None,
) -> Tensor:
    """Sum of ``weight * down((up + up_offset) * gate * sigmoid(alpha * gate))`` with gate and up clamped (gpt-oss).

    ``gate`` is clamped to at most ``limit``, ``up`` to ``[-limit, limit]``. Gate and up are the two halves of the
    projection, or its even and odd columns if ``interleaved``. DeepSeek-V4's experts have ``alpha = 1`` and
    ``up_offset = 0``. Indices outside ``[0, E)`` are dropped; the sum over experts is accumulated in float32.

    Args:
        hidden: the tokens ``[T, H]``, of any floating dtype.
        top_k_index: the experts of each token, int64 ``[T, K]``.
        top_k_weights: their routing weights ``[T, K]``, in any floating dtype.
        gate_up_proj: ``[E, 2I, H]``, in hidden's dtype.
        down_proj: ``[E, H, I]``, in hidden's dtype.
        gate_up_bias: ``[E, 2I]``.
        down_bias: ``[E, H]``.
        alpha: the factor of the gate within the sigmoid.
        limit: the largest gate, and the largest absolute value of up.
        interleaved: whether gate and up alternate along ``2I``. Otherwise gate is the first half.
        up_offset: added to up after the clamp.
        gate_up_lora: an adapter, as in :func:`standard`.
        down_lora: an adapter, as in :func:`standard`.

    Returns:
        ``[T, H]`` in hidden's dtype.

    Example:
        >>> hidden, gate_up, down = torch.tensor([[1.0], [100.0]]), torch.ones(1, 2, 1), torch.ones(1, 1, 1)
        >>> index, weights = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
        >>> clamped(hidden, index, weights, gate_up, down)  # (1 + 1) * silu(1), nearly; (7 + 1) * 7
        tensor([[ 1.6916],
                [55.9996]])
    """
    result = torch.zeros_like(hidden, dtype=compute_dtype(hidden))
    for expert in range(gate_up_proj.shape[0]):
        token, position = torch.where(top_k_index == expert)
        both = _linear(hidden[token], gate_up_proj, gate_up_bias, gate_up_lora, expert)
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        activation = (up + up_offset) * (gate * torch.sigmoid(gate * alpha))
        output = _linear(activation, down_proj, down_bias, down_lora, expert)
        weighted = output.to(result.dtype) * top_k_weights[token, position, None].to(result.dtype)
        result = result.index_add(0, token, weighted)
    return result.to(hidden.dtype)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, adapter: Adapter | None, expert: int) -> Tensor:
    """One expert's linear. With an adapter, that of ``weight + scaling * b @ a``, by products beside the weight's.

    Were the sum multiplied instead, an infinite ``b`` would make NaN of what the clamp may bound.
    """
    product = F.linear(rows, weight[expert], None if bias is None else bias[expert])
    if adapter is None:
        return product
    a, b, scaling = adapter
    return product + scaling * F.linear(F.linear(rows, a[expert]), b[expert])


def _with_biases(maker: SampleMaker, many: bool = False) -> SampleMaker:
    """The samples of ``maker`` with biases, every other one with an interleaved projection.

    With ``many`` elements, rounding in float32 would move some of them across the limit. So the limit is out of reach,
    and biases are small. Of the gradients that are sums over many rows, the second of these samples has only the
    biases': its projections are frozen and its hidden states small. Other sums would exceed the tolerances by rounding.
    """

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for number, sample in enumerate(maker(device, dtype)):
            hidden, *others = sample.args
            gate_up, draw = others[2], Draw(device, dtype, seed=number + 1)
            hidden = leaf(hidden.detach() / 2) if many and number else hidden
            if many and number:
                others[2:] = (projection.detach() for projection in others[2:])
            experts, width = gate_up.shape[:2]
            shapes, scale = ((experts, width), (experts, hidden.shape[1])), 0.25 if many else 1.0
            biases = (leaf(draw.normal(*shape, scale=scale)) for shape in shapes)
            limit = _OUT_OF_REACH if many else _limit(dtype)
            args = (hidden, *others, *biases, 1.702, limit, number % 2 == 0)
            yield replace(sample, args=args)

    return samples


_OUT_OF_REACH = 50.0


def _limit(dtype: torch.dtype) -> float:
    # Rounding moves values across the clamp's limit, where the derivative jumps. So only float32 samples reach it.
    return 2.0 if dtype == torch.float32 else _OUT_OF_REACH


def _clamped_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The standard samples with biases, one sample with transposed weights and no biases, and each option alone."""
    yield from _with_biases(_unadapted)(device, dtype)
    yield from with_adapters(_with_biases(_unadapted))(device, dtype)
    named = {sample.name: sample.args for sample in _unadapted(device, dtype)}
    hidden, index, weights, gate_up, down = named["transposed weights"]
    limit = _limit(dtype)
    gate_up, down = (leaf(w.detach().transpose(1, 2).contiguous().transpose(1, 2)) for w in (gate_up, down))
    yield Sample(
        "transposed, without biases", (hidden, index, weights, gate_up, down, None, None, 1.0, limit, False, 0.0)
    )
    problem = named["empty experts"]
    hidden, _, _, gate_up, _ = problem
    draw = Draw(device, dtype, seed=7)
    bias, down_bias = leaf(draw.normal(*gate_up.shape[:2])), leaf(draw.normal(len(gate_up), hidden.shape[1]))
    # Each option alone: a kernel that was made for one model may assume that they occur together.
    for name, options in (
        ("bias of gate and up alone", (bias, None, 1.702, limit)),
        ("bias of down alone", (None, down_bias, 1.702, limit)),
        ("interleaved, without biases", (None, None, 1.702, limit, True)),
        ("another alpha and offset, with biases", (bias, down_bias, 0.7, limit, False, 0.25)),
    ):
        yield Sample(name, (*problem, *options), values_only=True)
    for alpha, offset in ((1.0, 0.0), (0.7, 1.0)):  # each with the other order of gate and up
        name = f"interleaved, alpha {alpha} and an offset of {offset}"
        yield Sample(name, (*problem, bias, down_bias, alpha, limit / 2, True, offset), values_only=True)
    # With inputs that are too small to reach the default limit.
    yield Sample("the default options", (leaf(hidden.detach() / 4), *problem[1:]), values_only=True)


def _problem(draw: Draw, index: Tensor, hidden: int, intermediate: int, experts: int) -> tuple[Tensor, ...]:
    tokens, k = index.shape
    return (
        leaf(draw.normal(tokens, hidden)),
        index,
        leaf(draw.normal(tokens, k).abs()),
        leaf(draw.normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5)),
        leaf(draw.normal(experts, hidden, intermediate, scale=intermediate**-0.5)),
    )


def _distinct(draw: Draw, tokens: int, k: int, experts: int) -> Tensor:
    return draw.normal(tokens, experts).float().argsort(dim=-1)[:, :k]


def _past_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    index = _distinct(draw, 210, 2, 3)
    yield Sample("past 128 tokens and columns of an expert", _problem(draw, index, 152, 136, 3))
    yield Sample("193 experts, the last 43 empty", _problem(draw, _distinct(draw, 33, 12, 150), 24, 16, 193))
    index = _distinct(draw, 129, 2, 3)
    index[:, 0] = 0  # 129 tokens of one expert: one more than two tiles of 64
    yield Sample("aligned, past 128 tokens and columns", _problem(draw, index, 256, 192, 3))
    yield Sample("300 experts", _problem(draw, _distinct(draw, 17, 12, 300), 8, 8, 300))


def _combined_shapes(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)

    def make(
        tokens: int,
        choices: int,
        experts: int,
        widths: tuple[int, int],
        routes: str,
        router: str,
        layout: str,
        rank: int,
    ) -> Sample:
        low, high = {"all": (0, 0), "not the first": (2, 0), "not the last": (0, -2), "some dropped": (-1, 1)}[routes]
        index = draw.integers(experts + high, tokens, choices, low=low)
        hidden, index, weights, *projections = _problem(draw, index, *widths, experts)
        weights = leaf((weights.float() if router == "float32" else weights).detach().clamp(max=1.0) / choices)
        turned = [
            w.transpose(1, 2).contiguous().transpose(1, 2) if layout == TRANSPOSED else w
            for w in map(Tensor.detach, projections)
        ]
        states = laid_out(hidden.detach(), EVERY_OTHER if layout == EVERY_OTHER else CONTIGUOUS)
        if not rank:
            return Sample("", (states, index, weights, *map(leaf, turned)))
        adapters = {
            name: adapter(draw, w, rank, 0.25) for name, w in zip(("gate_up_lora", "down_lora"), turned, strict=True)
        }
        return Sample("", (states, index, weights, *turned), adapters, needs=(LORA,))

    shapes = {"tokens": (5, 70, 130), "choices": (1, 3, 9, 17), "experts": (6, 20)}
    kinds = {"router": ("its own", "float32"), "layout": LAYOUTS}
    widths = ((40, 24), (48, 48), (64, 32), (80, 160), (320, 40))  # I = H and 2I = H don't say how weights lie
    routes = ("all", "not the first", "not the last", "some dropped")
    for ranks in ((0,), (2, 16)):
        yield from together(
            make, **shapes, widths=widths[: 5 if ranks == (0,) else 3], routes=routes, **kinds, rank=ranks
        )


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Combinations in float32 alone: what 16 bits round of few tokens' gradients is at the tolerances."""
    yield from _past_a_tile(device, dtype)
    if dtype == torch.float32:
        yield from _combined_shapes(device, dtype)
    draw = Draw(device, dtype, seed=8)
    # In 16 bits nearly all are of one expert, of which 16 bits hold neither a count nor a sum on the way. In float32
    # such a sum's own rounding is at the tolerances.
    index = draw.integers(16, 8200, 8) * (dtype == torch.float32)
    index[-1] = 1
    hidden, index, weights, *projections = _problem(draw, index, 8, 8, 16)
    yield Sample("past 65535 rows of experts", (hidden, index, leaf(weights.detach().clamp(max=1.0)), *projections))
    problem = _problem(draw, _distinct(draw, 9, 1, 2), 32, 16, 2)
    for place, name in ((3, "gate and up"), (4, "down")) if device.type == "cpu" or has_room(device, dtype) else ():
        yield Sample(
            f"{name} past 2**31 elements", problem, values_only=True, laid_out=partial(_experts_far_apart, place)
        )
    draw = Draw(device, dtype, seed=9)
    for experts in (64, 160):
        index = draw.integers(experts + 9, 33, 6, low=-9)
        index[:, 1] = index[:, 0]
        *others, gate_up, down = _problem(draw, index, 8, 8, experts)
        turned = (leaf(w.detach().transpose(1, 2).contiguous().transpose(1, 2)) for w in (gate_up, down))
        name = f"{experts} experts, transposed, some twice in a row, some dropped"
        yield Sample(name, (*others, *turned), values_only=True)


def _experts_far_apart(place: int, sample: Sample) -> Sample:
    args = sample.args
    return replace(sample, args=(*args[:place], far_apart(args[place]), *args[place + 1 :]))


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    hidden, index, weights, *projections = _problem(draw, _distinct(draw, 2051, 8, 64), 1024, 384, 64)
    # Some of the 16408 weights would exceed 3, which a router's never do, and their rounding would dominate the error
    # of the gradients that are sums over rows: hence the clamp, here and below.
    yield Sample("a model's experts", (hidden, index, leaf(weights.detach().clamp(max=1.0)), *projections))
    uneven = draw.integers(3, 4099, 2) * draw.integers(80, 4099, 2)
    hidden, _, weights, *projections = _problem(draw, uneven, 512, 264, 160)
    # Expert 0 gets about 50 times as many tokens as any other. With routing weights an eighth as large, its gradients
    # are about as large as the others', and one tolerance fits all.
    lighter = leaf(weights.detach().clamp(max=1.0) * torch.where(uneven == 0, 0.125, 1.0).to(weights.dtype))
    yield Sample("most tokens to one of 160 experts", (hidden, uneven, lighter, *projections))


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from _unadapted(device, dtype)
    yield from with_adapters(_unadapted)(device, dtype)


def _unadapted(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)

    def problem(index: Tensor, hidden: int, intermediate: int, experts: int) -> tuple[Tensor, ...]:
        return _problem(draw, index, hidden, intermediate, experts)

    def distinct(tokens: int, k: int, experts: int) -> Tensor:
        return _distinct(draw, tokens, k, experts)

    yield Sample("odd sizes", problem(distinct(37, 2, 5), 40, 24, 5))
    yield Sample("empty experts", problem(distinct(11, 2, 3) * 2, 32, 16, 8))
    yield Sample("one expert takes all", problem(torch.full((65, 1), 2, device=device), 32, 16, 4))
    yield Sample("an expert twice in a row", problem(draw.integers(3, 17, 3), 32, 16, 3))
    yield Sample("dropped indices", problem(draw.integers(7, 19, 2), 32, 16, 4))
    yield Sample("indices below zero", problem(draw.integers(4, 19, 2, low=-2), 32, 16, 4))
    yield Sample("every index dropped", problem(torch.full((5, 2), 4, device=device), 32, 16, 4))
    yield Sample("no tokens", problem(torch.zeros(0, 2, dtype=torch.long, device=device), 32, 16, 4))
    _, *rest = problem(distinct(12, 2, 4), 32, 16, 4)
    wide = draw.normal(12, 64)
    yield Sample("hidden states with a stride", (leaf(wide[:, ::2]), *rest))
    hidden, index, weights, gate_up, down = problem(distinct(14, 2, 4), 24, 16, 4)
    gate_up, down = (leaf(w.detach().transpose(1, 2).contiguous().transpose(1, 2)) for w in (gate_up, down))
    yield Sample("transposed weights", (hidden, index, weights, gate_up, down))
    yield from _edges(device, dtype)


def _edges(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Routing weights of each sign and of zero, in float32 too; one expert or all, many choices; one token; widths."""
    draw = Draw(device, dtype, seed=5)

    def edge(name: str, index: Tensor, experts: int, widths: tuple[int, int] = (32, 16), wide: bool = False) -> Sample:
        hidden, index, _, gate_up, down = _problem(draw, index, *widths, experts)
        signed = draw.normal(*index.shape)
        signed = signed.float() if wide else signed
        signed[::4, :1] = 0.0  # as of a router with a learned gate, or one that drops tokens by a weight of 0
        return Sample(name, (hidden, index, leaf(signed), gate_up, down), values_only=True)

    yield edge("weights below zero and zero", _distinct(draw, 13, 2, 4), 4)
    yield edge("every expert of each token", _distinct(draw, 9, 3, 3), 3)
    yield edge("one choice of many", _distinct(draw, 17, 1, 6), 6)
    yield edge("one expert alone", torch.zeros(7, 1, dtype=torch.long, device=device), 1)
    yield edge("one token", _distinct(draw, 1, 2, 4), 4)
    yield edge("a router in float32", _distinct(draw, 13, 2, 4), 4, wide=True)
    yield edge("widths of 64, twelve choices", _distinct(draw, 7, 12, 16), 16, (64, 64))
    yield edge("widths of one", _distinct(draw, 9, 2, 3), 3, (1, 1))
    yield edge("nine choices, some twice, some dropped", draw.integers(8, 5, 9), 6)
    yield edge("fifteen empty experts at the end", _distinct(draw, 13, 4, 9), 24)


VALUES = tolerances(float32=(1e-5, 2e-6), bfloat16=(4e-2, 1e-2), float16=(5e-3, 1.3e-3))
GRADIENTS = tolerances(float32=(2e-5, 4e-6), bfloat16=(6e-2, 1.5e-2), float16=(8e-3, 2e-3))

CONTRACTS = {
    "standard": Contract(
        op_name="moe_experts",
        variant="standard",
        reference=standard,
        samples=_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        rows=("hidden", "top_k_index", "top_k_weights"),
    ),
    "clamped": Contract(
        op_name="moe_experts",
        variant="clamped",
        reference=clamped,
        samples=_clamped_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_with_biases(_beyond_a_tile),
        large=_with_biases(_large, many=True),
        rows=("hidden", "top_k_index", "top_k_weights"),
    ),
}
