"""A model with hub kernels, put there by the real ``kernels.kernelize``, is bound to ours instead.

The installed ``kernels`` is older than transformers 5.23 asks for, so transformers' own classes name no layers, and
``use_kernels=True`` is refused. The test names the layers of one model as transformers would.
"""

from __future__ import annotations

import functools

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
from tiny_training import AUTO, llama
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from veomni_bridges.use_kernels import bind_instead
from veomni_core import binding_of
from veomni_core.errors import BindingError, ConfigError

IDS = torch.tensor([[5, 9, 17, 3]])


@use_kernel_forward_from_hub("RMSNorm")
class NamedRMSNorm(LlamaRMSNorm):
    """As transformers' norms are with the version of ``kernels`` that it asks for."""


class NamedFunction(nn.Module):
    """As the layer is that ``kernels`` makes of a function."""

    kernel_layer_name = ""

    def forward(self, hidden_states):
        return hidden_states


class Zeros(nn.Module):
    """A hub kernel whose results can't be mistaken for a norm's."""

    def forward(self, hidden_states):
        return torch.zeros_like(hidden_states)


class Repository:
    """What a layer's mapping leads to; nothing is downloaded."""

    def load(self):
        return Zeros


def kernelized(*, shared: str = ""):
    """A model whose norms run a hub kernel, and one shared function, if it is named for a layer that has one."""
    model = llama()
    function = NamedFunction()
    function_layers = {"apply_rotary_pos_emb": function} if shared else {}
    NamedFunction.kernel_layer_name = shared
    for layer in model.model.layers:
        layer.self_attn._kernel_funcs = function_layers  # as kernels.use_kernelized_func sets it
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = NamedRMSNorm
    with use_kernel_mapping({"RMSNorm": {"cpu": {Mode.TRAINING: Repository()}}}, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device="cpu")
    model._use_kernels = True  # as transformers' kernelize sets it
    return model


@pytest.fixture
def model():
    return kernelized()


def loss(model) -> torch.Tensor:
    return model(IDS, labels=IDS).loss.detach()


def test_our_kernels_run_instead_and_undo_gives_the_eager_model(model):
    assert not torch.allclose(loss(model), loss(llama()))  # the hub kernel runs
    binding = bind_instead(model, AUTO)
    assert "rms_norm/standard:torch at 5 sites" in repr(binding)
    torch.testing.assert_close(loss(model), loss(llama()))
    model.eval().train()
    torch.testing.assert_close(loss(model), loss(llama()))
    binding.undo()
    assert torch.equal(loss(model), loss(llama()))


def test_a_config_that_is_refused_leaves_the_hub_kernels(model):
    before = loss(model)
    with pytest.raises(ConfigError, match="tirton"):
        bind_instead(model, {"rms_norm_implementation": "tirton"})
    assert torch.equal(loss(model), before) and model.use_kernels and binding_of(model) is None


def test_a_forward_that_others_have_replaced_since_is_not_lost(model):
    norm = model.model.norm
    theirs = norm.forward = functools.partial(norm.forward)
    with pytest.raises(BindingError, match=r"the forward of model.norm was replaced since"):
        bind_instead(model, AUTO)
    assert norm.forward is theirs and model.use_kernels


def test_a_shared_function_without_a_hub_kernel_is_left_alone():
    model = kernelized(shared="without a kernel")
    function = model.model.layers[0].self_attn._kernel_funcs["apply_rotary_pos_emb"]
    forward = vars(function)["forward"]
    bind_instead(model, AUTO)
    assert vars(function)["forward"] is forward


def test_a_hub_kernel_in_a_shared_function_is_refused():
    model = kernelized(shared="RMSNorm")
    with pytest.raises(BindingError, match=r"apply_rotary_pos_emb runs one, and all models of this process share it"):
        bind_instead(model, AUTO)
    assert model.use_kernels and binding_of(model) is None
