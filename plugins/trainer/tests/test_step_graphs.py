"""Micro-steps as graphs give the losses, gradients and weights of micro-steps without; captured by a stand-in here.

A GPU captures for itself in test_on_a_gpu.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3 import modeling_gemma3

from veomni_core.errors import ConfigError
from veomni_trainer.loop.step_graphs import LengthMasks, StepGraphs, why_not_captured

SMALL, LARGE = 3, 5
# A layer that sees three positions, and one that sees all.
GEMMA = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
}


class Model(nn.Module):
    """Two linears of which the second is used where ``deep`` is set."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(dropout)

    def forward(self, x: Tensor, deep: bool = True) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(x)))
        return self.second(hidden) if deep else hidden


class Recorded(TorchDispatchMode):
    """What a CUDA graph does, on a CPU: notes torch's operators, and runs them on the same tensors, without Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def capture_in(model: nn.Module) -> Callable[[Any], Any]:
    """As on a GPU, nothing is computed at the capture: sums stay as they were, and what is new is no number."""

    def capture(call: Callable[[], Mapping[str, Tensor]]) -> tuple[Callable[[], None], Mapping[str, Tensor]]:
        sums = {
            parameter.grad: parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
        }
        with Recorded() as recorded:
            results = call()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for new in [*results.values(), *(each for each in gradients if each not in sums)]:
            new.fill_(torch.nan)
        for gradient, before in sums.items():
            gradient.copy_(before)
        return recorded.replay, results

    return capture


def graphs_of(
    model: nn.Module,
    accumulates: bool = False,
    repeats_forwards: bool = False,
    random_state: Callable[[], Tensor] = lambda: torch.zeros(1),
) -> StepGraphs:
    return StepGraphs(model, accumulates, repeats_forwards, capture_in(model), random_state)


def step_of(
    model: nn.Module, options: Callable[[], dict[str, Any]] = dict
) -> Callable[[dict[str, Any]], Mapping[str, Tensor]]:
    def step(inputs: dict[str, Any]) -> Mapping[str, Tensor]:
        loss = model(inputs["input_ids"], **options()).square().sum()
        loss.backward()
        return {"loss": loss.detach()}

    return step


def batches(sizes: list[int]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        yield torch.randn(size, 4, generator=generator)


def trained(sizes: list[int], micro_steps: int, as_graphs: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The losses, and the weights after AdamW has stepped after each so many micro-steps."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = step_of(model)
    graphs = graphs_of(model, accumulates=micro_steps > 1)
    losses = []
    for number, x in enumerate(batches(sizes), start=1):
        found = graphs(step, {"input_ids": x}) if as_graphs else step({"input_ids": x})
        losses.append(found["loss"])
        if number % micro_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [parameter.detach() for parameter in model.parameters()]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.sampled_from([SMALL, LARGE]), min_size=8, max_size=16), micro_steps=st.integers(1, 3))
def test_losses_and_weights_are_those_without_graphs(sizes: list[int], micro_steps: int) -> None:
    for found, wanted in zip(trained(sizes, micro_steps, True), trained(sizes, micro_steps, False), strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


def test_a_parameter_that_no_step_uses_has_no_gradient() -> None:
    model = Model()
    graphs, step = graphs_of(model), step_of(model, lambda: {"deep": False})
    for x in batches([SMALL] * 6):
        model.zero_grad()
        graphs(step, {"input_ids": x})
        assert model.first.weight.grad is not None
        assert model.second.weight.grad is None


def test_a_sum_of_gradients_that_lacks_some_in_a_step_is_refused() -> None:
    model = Model()
    deep = iter([True, False])
    graphs, step = graphs_of(model, accumulates=True), step_of(model, lambda: {"deep": next(deep)})
    first, second = batches([SMALL] * 2)
    graphs(step, {"input_ids": first})
    with pytest.raises(ConfigError, match=r"some parameters have gradients in some steps alone; write cuda_graphs"):
        graphs(step, {"input_ids": second})


def test_a_step_that_adds_to_sums_takes_no_memory_for_other_gradients() -> None:
    model = Model()
    graphs, step = graphs_of(model, accumulates=True), step_of(model)
    held = set()
    for x in batches([SMALL, LARGE] * 5):
        model.zero_grad()
        graphs(step, {"input_ids": x})
        held |= {parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None}
    assert len(held) == len([*model.parameters()])


def test_numbers_that_a_graph_can_not_draw_again_are_refused() -> None:
    (x,) = batches([SMALL])
    drawn = iter(range(9))
    graphs = graphs_of(Model(), repeats_forwards=True, random_state=lambda: torch.tensor(next(drawn)))
    with pytest.raises(ConfigError, match=r"draws random numbers.*set the model's dropout to 0, or write cuda_graphs"):
        graphs(step_of(Model()), {"input_ids": x})
    graphs_of(Model(), random_state=lambda: torch.tensor(next(drawn)))(step_of(Model()), {"input_ids": x})


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random], ids=["torch", "Python"])
def test_numbers_that_python_draws_are_refused(draw: Callable[[], Any]) -> None:
    model = Model()
    (x,) = batches([SMALL])
    with pytest.raises(ConfigError, match=r"draws random numbers on the CPU.*layerdrop to 0, or write cuda_graphs"):
        graphs_of(model)(step_of(model, lambda: {"deep": bool(draw())}), {"input_ids": x})


def test_ever_new_shapes_are_refused() -> None:
    model = Model()
    graphs = graphs_of(model)
    with pytest.raises(ConfigError, match=r"have had 9 forms, the last one input_ids \[9, 4\], and each needs"):
        for x in batches(list(range(1, 10))):
            graphs(step_of(model), {"input_ids": x})


def test_inputs_by_which_sequences_begin_elsewhere_are_refused() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="the model is given attention_mask too, by which sequences begin or end"):
        graphs_of(model)(step_of(model), {"input_ids": torch.zeros(1, 4), "attention_mask": torch.ones(1, 4)})


def test_a_failed_capture_leaves_the_gradients_as_they_were() -> None:
    model = Model()

    def capture(call: Any) -> Any:
        raise ConfigError("not today")

    graphs = StepGraphs(model, False, False, capture, lambda: torch.zeros(1))
    *eager, last = batches([SMALL] * 4)
    for x in eager:
        model.zero_grad()
        graphs(step_of(model), {"input_ids": x})
    before = model.first.weight.grad
    with pytest.raises(ConfigError, match="not today"):
        graphs(step_of(model), {"input_ids": last})
    assert model.first.weight.grad is before


@pytest.mark.parametrize(
    ("words", "what"),
    [("operation not permitted when stream is capturing\nSee", "operation not permitted"), ("", "RuntimeError")],
)
def test_a_step_that_can_not_be_captured_is_told_by_the_kernel_that_ended_it(words: str, what: str) -> None:
    kernel: dict[str, Any] = {"__name__": "acme_kernels.cross_entropy_loss", "words": words}
    exec("def causal(count):\n    raise RuntimeError(words)", kernel)
    with pytest.raises(RuntimeError) as caught:
        kernel["causal"](1)
    found = why_not_captured(caught.value.with_traceback(caught.tb.tb_next))  # without this function
    assert found.startswith("train.cuda_graphs: acme_kernels.cross_entropy_loss.causal waits for the GPU")
    assert f"can't repeat: {what}" in found


def test_a_captured_forward_is_given_the_masks_of_one_before_it_and_builds_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = []
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        function = getattr(modeling_gemma3, name)

        def building(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            built.append(function)
            return function(*args, **kwargs)

        monkeypatch.setattr(modeling_gemma3, name, building)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA))
    first, second = torch.arange(10).view(2, 5), torch.arange(3, 13).view(2, 5)
    wanted = model(input_ids=second).logits
    masks: list[Any] = []
    with LengthMasks(model).kept(masks):
        model(input_ids=first)
    assert len(masks) == 2 and len(built) == 4
    with LengthMasks(model).given(masks):
        assert torch.equal(model(input_ids=second).logits, wanted)
    assert len(built) == 4
    assert "forward" not in vars(model.model)
