"""Short convolutions that their layers call without a word on packed sequences, as Inkling's: told all the same."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.inkling.modeling_inkling import InklingShortConvolution, causal_conv1d_fn

from counting_kernels import calls, counting_registry
from hybrid_models import LENGTHS, hybrid, tokens
from test_hybrid_packing import KERNELS, POSITIONS, WAYS, assert_apart
from veomni_core import bind, find_sites
from veomni_core.errors import PackedSequencesError

pytestmark = pytest.mark.thorough

ROW = tokens(1, sum(LENGTHS))


def inkling():
    model = hybrid("inkling_text")
    model.config.use_cache = False
    return model


def test_a_convolution_that_holds_no_linear_is_found_with_its_own_width():
    sites = {site.path: site for site in find_sites(inkling()) if site.op_name == "causal_conv1d"}
    assert {path.rpartition(".")[2] for path in sites} == {"k_sconv", "v_sconv", "attn_sconv", "mlp_sconv"}
    assert {site.variant for site in sites.values()} == {"standard"}
    assert sites["model.layers.0.attn_sconv"].sizes["channels"] == (64,)
    assert sites["model.layers.0.self_attn.k_sconv"].sizes["channels"] != (64,)


def test_each_runs_the_kernel():
    model = inkling()
    calls.clear()
    bind(model, {"preset": "eager", "causal_conv1d_implementation": "auto"}, registry=counting_registry("one"))
    model(ROW)
    assert calls[("causal_conv1d", "standard", "one")] == 4 * len(model.model.layers)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_are_told_again(reentrant):
    model = inkling()
    bind(model, KERNELS)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_apart(model, ROW, WAYS["position_ids"], LENGTHS)


def test_a_copy_is_told_by_its_own_layers():
    model = inkling()
    bind(model, KERNELS)
    assert_apart(copy.deepcopy(model), ROW, WAYS["position_ids"], LENGTHS)


def test_nothing_stays_behind():
    model = inkling()
    before = {path: (type(module), dict(vars(module))) for path, module in model.named_modules()}
    with bind(model, KERNELS):
        packed = model(ROW, position_ids=POSITIONS).logits
        assert not torch.allclose(packed, model(ROW).logits)  # a step that packs nothing is told of nothing
    assert {path: (type(module), dict(vars(module))) for path, module in model.named_modules()} == before


class Deaf(InklingShortConvolution):
    """Takes no argument by which it could be told."""

    def forward(self, hidden_states, past_key_values=None, conv_mask=None):
        x = hidden_states.transpose(1, 2)
        return causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias).transpose(1, 2) + hidden_states


def test_one_that_can_not_be_told_is_refused_by_name():
    model = inkling()
    model.model.layers[1].attn_sconv.__class__ = Deaf
    bind(model, KERNELS)
    words = (
        r"attn_sconv \(\w*Deaf\w*\) would mix them: model\.layers\.1 \(\w+\) calls its attn_sconv without saying where"
    )
    with pytest.raises(PackedSequencesError, match=words):
        model(ROW, position_ids=POSITIONS)


def test_the_step_after_one_that_failed_is_told_of_nothing():
    model = inkling()
    bind(model, KERNELS)
    wanted = model(ROW).logits
    mlp = model.model.layers[0].mlp
    handle = mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ROW, position_ids=POSITIONS)
    handle.remove()
    assert torch.equal(model(ROW).logits, wanted)


@pytest.mark.thorough
def test_a_compiled_layer_is_told_in_the_steps_that_pack_alone():
    torch._dynamo.reset()
    model = inkling()
    bind(model, KERNELS)
    plain, packed = model(ROW).logits, model(ROW, position_ids=POSITIONS).logits
    convolving = model.model.layers[0].self_attn
    convolving.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(model(ROW).logits, plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(ROW, position_ids=POSITIONS).logits, packed, rtol=1e-4, atol=1e-5)
