"""``kda``'s contract: its reference, the faults that it catches, and the calls that it refuses."""

from __future__ import annotations

import pytest
import torch
from planted_faults import WrongGradient, assert_caught
from torch.nn import functional as F

from kda_models import FAMILIES, OP, needs_kda, own
from veomni_ops.kda import check_call, standard

pytestmark = needs_kda


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_equals_transformers_own_code(name):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 70, 3, width) for width in (8, 8, 6)]
    inputs += [-torch.rand(2, 70, 3, 8), torch.rand(2, 70, 3)]
    options = {"initial_state": torch.randn(2, 3, 8, 6), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found = standard(*inputs, **options)
    torch.testing.assert_close(found, own(name)(*inputs, **options), rtol=1e-4, atol=1e-5)


def gradient_of_g_is_off(query, key, value, g, beta, **options):
    return standard(query, key, value, WrongGradient.apply(g, 1.03), beta, **options)


def gradient_of_beta_is_off(query, key, value, g, beta, **options):
    return standard(query, key, value, g, WrongGradient.apply(beta, 0.97), **options)


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


def decay_is_that_of_the_head(query, key, value, g, beta, **options):
    """As the gated delta rule has it."""
    return standard(query, key, value, g.mean(-1, keepdim=True).expand_as(g), beta, **options)


def cumulated_decays_overflow(query, key, value, g, beta, **options):
    """As a kernel that divides by the cumulated decay: infinite where much is forgotten."""
    lost = (-g.cumsum(1)).exp()
    return standard(query, key, value * (lost / lost).mean(-1, keepdim=True).to(value.dtype), g, beta, **options)


def differences_of_cumulated_decays(query, key, value, g, beta, **options):
    """What comes after a large decay has lost its own."""
    cumulated = g.cumsum(1)
    return standard(query, key, value, F.pad(cumulated.diff(dim=1), (0, 0, 0, 0, 1, 0)), beta, **options)


FAULTS = {
    gradient_of_g_is_off: "gradient of g",
    gradient_of_beta_is_off: "gradient of beta",
    state_is_carried_over: "packed",
    decay_is_ignored: "off",
    decay_is_that_of_the_head: "off",
    cumulated_decays_overflow: "large decay",
    differences_of_cumulated_decays: "forget",
}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
def test_the_contract_catches(kernel):
    assert_caught(kernel, FAULTS[kernel], op=OP)


Q, V, G, BETA = torch.zeros(1, 7, 2, 8), torch.zeros(1, 7, 4, 6), torch.zeros(1, 7, 4, 8), torch.zeros(1, 7, 4)
MISTAKES = {
    "g has one number per head": ({"g": BETA}, "g is (1, 7, 4), expected (1, 7, 4, 8): one number per token, head and"),
    "g has the key heads": ({"g": G[:, :, :2]}, "g is (1, 7, 2, 8), expected (1, 7, 4, 8)"),
    "beta per channel": ({"beta": G}, "beta is (1, 7, 4, 8), expected (1, 7, 4): one number per token and head"),
    "value has another length": ({"value": V[:, 1:]}, "expected [B, S, H, K] twice"),
    "a state of another batch": ({"initial_state": torch.zeros(2, 4, 8, 6)}, "expected (1, 4, 8, 6)"),
    "boundaries that don't add up": ({"cu_seqlens": torch.tensor([0, 3, 6])}, "from 0 to 6, expected from 0 to 7"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call_that_does_not_fit_is_refused(name):
    wrong, words = MISTAKES[name]
    with pytest.raises(ValueError) as error:
        standard(**{"query": Q, "key": Q, "value": V, "g": G, "beta": BETA, **wrong})
    assert words in str(error.value)
