"""``chunk_gated_delta_rule``'s contract: its reference, the faults that it catches, and the calls that it refuses."""

from __future__ import annotations

import pytest
import torch
from planted_faults import WrongGradient, assert_caught
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from delta_rule_models import OP
from veomni_ops.chunk_gated_delta_rule import check_call, standard

FILES = (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe, modeling_olmo_hybrid)


@pytest.mark.parametrize("modeling", FILES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_the_reference_equals_transformers_own_code(modeling):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 70, heads, width) for heads, width in ((2, 8), (2, 8), (4, 6))]
    inputs += [-torch.rand(2, 70, 4), torch.rand(2, 70, 4)]
    options = {"initial_state": torch.randn(2, 4, 8, 6), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found = standard(*inputs, **options)
    torch.testing.assert_close(found, modeling.torch_chunk_gated_delta_rule(*inputs, **options), rtol=1e-4, atol=1e-5)


def gradient_of_g_is_off(query, key, value, g, beta, **options):
    return standard(query, key, value, WrongGradient.apply(g, 1.03), beta, **options)


def gradient_of_the_state_is_off(*args, initial_state=None, **options):
    state = None if initial_state is None else WrongGradient.apply(initial_state, 1.03)
    return standard(*args, initial_state=state, **options)


def no_gradient_through_the_final_state(*args, **options):
    output, final = standard(*args, **options)
    return output, None if final is None else WrongGradient.apply(final, 0.0)


def state_is_carried_over(*args, cu_seqlens=None, initial_state=None, output_final_state=False, **options):
    """Each packed sequence begins with what the one before it left."""
    if cu_seqlens is None:
        return standard(*args, initial_state=initial_state, output_final_state=output_final_state, **options)
    outputs, finals = [], []
    for index, (first, last) in enumerate(check_call(*args, initial_state, cu_seqlens)):
        begun = 0 if initial_state is None else initial_state[index : index + 1]
        state = begun + (finals[-1] if finals else torch.zeros(()))
        pieces = [x[:, first:last] for x in args]
        state = state.expand(1, args[2].shape[2], args[0].shape[3], args[2].shape[3])
        output, final = standard(*pieces, initial_state=state, output_final_state=True, **options)
        outputs.append(output)
        finals.append(final)
    return torch.cat(outputs, dim=1), torch.cat(finals) if output_final_state else None


def decay_is_ignored(query, key, value, g, beta, **options):
    return standard(query, key, value, 0.0 * g, beta, **options)


def cumulated_decays_overflow(query, key, value, g, beta, **options):
    """As a kernel that divides by the cumulated decay: infinite where much is forgotten."""
    lost = (-g.cumsum(1)).exp()
    return standard(query, key, value * (lost / lost).unsqueeze(-1).to(value.dtype), g, beta, **options)


FAULTS = {
    gradient_of_g_is_off: "gradient of g",
    gradient_of_the_state_is_off: "gradient of initial_state",
    no_gradient_through_the_final_state: "gradient of",
    state_is_carried_over: "packed",
    decay_is_ignored: "off",
    cumulated_decays_overflow: "large decay",
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
def test_the_contract_catches(kernel):
    assert_caught(kernel, FAULTS[kernel], op=OP)


Q, V, G = torch.zeros(1, 7, 2, 8), torch.zeros(1, 7, 4, 6), torch.zeros(1, 7, 4)
MISTAKES = {
    "value has another length": ({"value": V[:, 1:]}, "expected [B, S, H, K] twice"),
    "value heads are no multiple": ({"value": V[:, :, :3], "g": G[:, :, :3], "beta": G[:, :, :3]}, "multiple of the 2"),
    "g has the key heads": ({"g": G[:, :, :2]}, "g is (1, 7, 2), expected (1, 7, 4)"),
    "a state of another batch": ({"initial_state": torch.zeros(2, 4, 8, 6)}, "expected (1, 4, 8, 6)"),
    "boundaries that don't add up": ({"cu_seqlens": torch.tensor([0, 3, 6])}, "from 0 to 6, expected from 0 to 7"),
    "boundaries that go back": ({"cu_seqlens": torch.tensor([0, 5, 3, 7])}, "goes back from 5 to 3"),
    "boundaries in float": ({"cu_seqlens": torch.tensor([0.0, 7.0])}, "expected integers"),
    "packed in a batch": (
        {"query": Q.expand(2, -1, -1, -1), "key": Q.expand(2, -1, -1, -1), "value": V.expand(2, -1, -1, -1),
         "g": G.expand(2, -1, -1), "beta": G.expand(2, -1, -1), "cu_seqlens": torch.tensor([0, 7])},
        "a batch of 2",
    ),
    "a state per row and not per sequence": (
        {"initial_state": torch.zeros(1, 4, 8, 6), "cu_seqlens": torch.tensor([0, 3, 7])},
        "expected (2, 4, 8, 6)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call_that_does_not_fit_is_refused(name):
    wrong, words = MISTAKES[name]
    with pytest.raises(ValueError) as error:
        standard(**{"query": Q, "key": Q, "value": V, "g": G, "beta": G, **wrong})
    assert words in str(error.value)
