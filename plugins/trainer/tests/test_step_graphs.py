"""Micro-steps as graphs give the losses, gradients and weights of micro-steps without; captured by a stand-in here.

A GPU captures for itself in test_on_a_gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3 import modeling_gemma3

from veomni_core.errors import ConfigError
from veomni_trainer.loop.length_masks import LengthMasks
from veomni_trainer.loop.step_graphs import StepGraphs, why_not_captured

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


def capture_in(model: nn.Module) -> Callable[[Any], Any]:
    """What a CUDA graph does, on a CPU: nothing is computed at first, and later runs write where the first one did."""

    def capture(call: Callable[[], Mapping[str, Tensor]]) -> tuple[Callable[[], None], Mapping[str, Tensor]]:
        sums = {p: (p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None}
        results = call()
        gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
        for parameter, gradient in gradients.items():
            gradient.copy_(sums[parameter][1]) if parameter in sums else gradient.fill_(torch.nan)
        for result in results.values():
            result.fill_(torch.nan)

        def replay() -> None:
            for parameter in model.parameters():
                parameter.grad = sums[parameter][0] if parameter in sums else None
            for name, result in call().items():
                results[name].copy_(result)
            for parameter, gradient in gradients.items():
                if parameter not in sums:
                    assert parameter.grad is not None
                    gradient.copy_(parameter.grad)

        return replay, results

    return capture


def graphs_of(model: nn.Module, accumulates: bool = False, repeats_forwards: bool = False) -> StepGraphs:
    return StepGraphs(model, accumulates, repeats_forwards, capture_in(model), torch.get_rng_state)


def step_of(model: nn.Module) -> Callable[[dict[str, Any]], Mapping[str, Tensor]]:
    def step(inputs: dict[str, Any]) -> Mapping[str, Tensor]:
        loss = model(**inputs).square().sum()
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
        found = graphs(step, {"x": x}) if as_graphs else step({"x": x})
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


def test_a_parameter_that_a_form_does_not_use_has_no_gradient() -> None:
    model = Model()
    graphs, step = graphs_of(model), step_of(model)
    for x in batches([SMALL] * 6):
        model.zero_grad()
        graphs(step, {"x": x, "deep": False})
        assert model.first.weight.grad is not None
        assert model.second.weight.grad is None


def test_a_sum_of_gradients_that_lacks_some_in_a_form_is_refused() -> None:
    model = Model()
    graphs, step = graphs_of(model, accumulates=True), step_of(model)
    with pytest.raises(ConfigError, match=r"some parameters have gradients in some steps alone; write cuda_graphs"):
        for number, x in enumerate(batches([SMALL] * 8)):
            graphs(step, {"x": x, "deep": number % 2 == 0})


def test_a_dropout_that_a_repeated_forward_draws_again_is_refused() -> None:
    model = Model(dropout=0.5)
    (x,) = batches([SMALL])
    with pytest.raises(ConfigError, match=r"draws random numbers.*set the model's dropout to 0, or write cuda_graphs"):
        graphs_of(model, repeats_forwards=True)(step_of(model), {"x": x})
    graphs_of(Model(), repeats_forwards=True)(step_of(model.eval()), {"x": x})
    graphs_of(model.train())(step_of(model), {"x": x})


def test_ever_new_shapes_are_refused() -> None:
    model = Model()
    graphs = graphs_of(model)
    with pytest.raises(ConfigError, match=r"have had 9 forms, the last one \(\('x', \(9, 4\), torch.float32\),\)"):
        for x in batches(list(range(1, 10))):
            graphs(step_of(model), {"x": x})


def test_an_input_of_another_kind_is_refused() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="the model is given deep, a list, which a graph can't be given anew"):
        graphs_of(model)(step_of(model), {"x": torch.zeros(1, 4), "deep": [True]})


def test_a_step_that_can_not_be_captured_is_told_by_the_kernel_that_ended_it() -> None:
    kernel = {"__name__": "veomni_acme.cross_entropy_loss"}
    exec("def causal(count):\n    raise RuntimeError('operation not permitted when stream is capturing\\nSee')", kernel)
    try:
        try:
            kernel["causal"](1)
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as error:
        found = why_not_captured(error)
    assert found.startswith(
        "train.cuda_graphs: veomni_acme.cross_entropy_loss.causal waits for the GPU, or does something else that a "
        "graph can't repeat: operation not permitted when stream is capturing. Name another kernel"
    )


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
