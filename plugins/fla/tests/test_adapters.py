"""What the adapters do around the libraries' calls: the contracts, with plain PyTorch in the libraries' place."""

from __future__ import annotations

from dataclasses import replace

import plain_libraries
import pytest
import torch

from veomni_conformance import check_kernel
from veomni_fla import causal_conv1d, delta_rules
from veomni_fla.causal_conv1d import _boundaries, _laid_out
from veomni_fla.plugin import veomni_kernels
from veomni_ops.chunk_gated_delta_rule import check_call, standard
from veomni_ops.contract import Size

SPECS = {str(spec): spec for spec in veomni_kernels()}
PLAIN = {
    "chunk_gated_delta_rule/standard:fla": "fla_delta",
    "chunk_gated_delta_rule/standard:fla_tilelang": "fla_tilelang",
    "chunk_gated_delta_rule/standard:flash_qla": "flash_qla",
    "kda/standard:fla": "fla_kda",
    "causal_conv1d/standard:fla": "fla_conv",
    "causal_conv1d/standard:causal_conv1d": "package_conv",
    "rms_norm_gated/sigmoid:fla": "fla_norm",
    "mamba2_scan/standard:mamba_ssm": "mamba_ssm",
}


def test_every_kernel_has_a_plain_library_in_its_place():
    assert {*PLAIN} == {*SPECS}


SLOW = "chunk_gated_delta_rule/standard:flash_qla"  # its heads are padded to 128


@pytest.mark.parametrize(
    "kernel, dtype",
    [
        pytest.param(name, dtype, marks=[pytest.mark.thorough] * (name == SLOW))
        for name in PLAIN
        for dtype in SPECS[name].dtypes
        if dtype != "float16"
    ],
)
def test_the_contract(kernel, dtype):
    spec = replace(SPECS[kernel], factory=f"plain_libraries:{PLAIN[kernel]}")
    check_kernel(spec, "cpu", dtype, largest=Size.SMALL, every_form=False).raise_if_failed()


@pytest.mark.parametrize("kernel", ["fla_delta", "flash_qla"])
def test_float32_is_refused_since_the_libraries_multiply_in_tf32(kernel):
    q, g = torch.ones(1, 4, 2, 8), torch.zeros(1, 4, 2)
    with pytest.raises(TypeError, match="computes bfloat16 or float16, not float32"):
        getattr(plain_libraries, kernel)()(q, q, q, g, g)


def test_a_batch_past_what_fla_launches_is_convolved_in_parts(monkeypatch):
    """CUDA refuses a launch of more than 65535 planes of blocks, of which fla has one for each sequence."""
    x, weight = torch.randn(5, 3, 7), torch.randn(3, 4)
    whole = plain_libraries.fla_conv()(x, weight)
    monkeypatch.setattr(causal_conv1d, "MOST_PLANES", 2)
    torch.testing.assert_close(plain_libraries.fla_conv()(x, weight), whole)


@pytest.mark.parametrize("kernel", ["fla_delta", "fla_tilelang", "fla_kda"])
@pytest.mark.parametrize("states", [True, False], ids=["states", "no states"])
def test_a_batch_past_what_fla_launches_is_computed_in_parts(kernel, states, monkeypatch):
    q, v = torch.randn(5, 3, 2, 16).bfloat16(), torch.randn(5, 3, 4, 16).bfloat16()
    g = -torch.rand(5, 3, 4, *(16,) * (kernel == "fla_kda"))
    inputs = [x.requires_grad_() for x in (q, q.clone(), v, g, torch.rand(5, 3, 4))]
    options = {"initial_state": torch.randn(5, 4, 16, 16), "output_final_state": True} if states else {}

    def results():
        found = [x for x in getattr(plain_libraries, kernel)()(*inputs, **options) if x is not None]
        return [*found, *torch.autograd.grad(sum(x.sum() for x in found), inputs)]

    whole = results()
    monkeypatch.setattr(delta_rules, "MOST_PLANES", 9)  # two rows of four heads
    torch.testing.assert_close(results(), whole)


def test_heads_that_flash_qla_has_no_room_for_are_refused():
    q, g = torch.ones(1, 4, 2, 136).bfloat16(), torch.zeros(1, 4, 2)
    with pytest.raises(ValueError, match="does not compute wide_heads: it takes heads of up to 128, not 136"):
        plain_libraries.flash_qla()(q, q, q, g, g)


def _behind_its_start(x):
    """``x`` one element behind the start of its memory."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_gradients_that_begin_at_an_odd_address_are_copied():
    """Heads as wide as a tile, so that the incoming gradients reach the library as they are."""
    q, g = torch.randn(1, 3, 2, 16).bfloat16().requires_grad_(), torch.zeros(1, 3, 2)
    output, state = plain_libraries.fla_tilelang()(q, q, q, g, g + 0.5, output_final_state=True)
    torch.autograd.backward([output, state], [_behind_its_start(torch.ones_like(x)) for x in (output, state)])
    assert q.grad.abs().sum() > 0


def _of_odd_stride(x):
    """``x`` of one head with a stride of its own, which PyTorch calls contiguous all the same."""
    return x.as_strided(x.shape, (*x.stride()[:2], 3, *x.stride()[3:]))


@pytest.mark.parametrize("kernel", ["fla_tilelang", "flash_qla"])
def test_a_single_head_may_have_any_stride(kernel):
    q, g = (_of_odd_stride(torch.randn(1, 5, 1, *width)) for width in ((128,), ()))
    q = q.bfloat16() * (torch.arange(128) < 8)
    q, g, beta = (_of_odd_stride(x).requires_grad_() for x in (q, -g.abs(), g.sigmoid()))
    assert q.is_contiguous() and g.stride() == (5, 1, 3)
    output, _ = getattr(plain_libraries, kernel)()(q, q, q, g, beta, use_qk_l2norm_in_kernel=True)
    output.backward(_of_odd_stride(torch.ones_like(output)))
    assert all(x.grad.abs().sum() > 0 for x in (q, g, beta))


@pytest.mark.parametrize("key_heads, value_heads", [(1, 3), (3, 3), (3, 9), (5, 5)])
def test_flash_qla_gets_heads_of_zeros_to_an_even_number(key_heads, value_heads):
    def drawn(*shape):
        return torch.randn(1, 5, *shape)

    q, k, v = (drawn(heads, 8).bfloat16() for heads in (key_heads, key_heads, value_heads))
    g, beta, state = -drawn(value_heads).abs(), drawn(value_heads).sigmoid(), torch.randn(1, value_heads, 8, 8)
    call = (q, k, v, g, beta, None, state, True, True)
    torch.testing.assert_close(plain_libraries.flash_qla()(*call), standard(*call))


@pytest.mark.parametrize("with_state", [True, False])
def test_flash_qla_gets_the_packed_sequences_that_have_tokens(with_state):
    q, g, bounds = torch.randn(1, 4, 2, 8).bfloat16(), torch.zeros(1, 4, 2), torch.tensor([0, 0, 3, 3, 4, 4])
    state = torch.randn(5, 2, 8, 8) if with_state else None
    call = (q, q, q, g, g + 0.5, None, state, True, True, bounds)
    torch.testing.assert_close(plain_libraries.flash_qla()(*call), standard(*call))


def test_boundaries_are_copied_for_every_call():
    """fla remembers what it derived from a tensor by the tensor's identity, and a buffer may have other values then."""
    seen = []

    def library(q, k, v, g, beta, cu_seqlens, **options):
        seen.append(cu_seqlens)
        return torch.zeros_like(v), None

    kernel = delta_rules.adapted("fla", library, check_call, delta_rules.even)
    q, g, bounds = torch.ones(1, 4, 2, 8).bfloat16(), torch.zeros(1, 4, 2), torch.tensor([0, 1, 4], dtype=torch.int32)
    kernel(q, q, q, g, g, cu_seqlens=bounds)
    bounds[1] = 3
    kernel(q, q, q, g, g, cu_seqlens=bounds)
    assert [each.tolist() for each in seen] == [[0, 1, 4], [0, 3, 4]]


def test_lengths_that_do_not_add_up_are_refused_before_the_library_is_called():
    q, g = torch.ones(1, 4, 2, 8).bfloat16(), torch.zeros(1, 4, 2)
    with pytest.raises(ValueError, match="cu_seqlens goes from 0 to 3, expected from 0 to 4"):
        plain_libraries.fla_delta()(q, q, q, g, g, cu_seqlens=torch.tensor([0, 3]))


def test_numbers_of_several_rows_become_boundaries_of_one():
    numbers = torch.tensor([[3, 3, 5], [0, 1, 1]])
    assert _boundaries(numbers).tolist() == [0, 2, 3, 4, 6]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 6, 16).transpose(1, 2),
        torch.randn(2, 16, 6),
        torch.randn(2, 6, 24)[..., 8:].transpose(1, 2),
        torch.randn(2, 6, 20)[..., :16].transpose(1, 2),
        torch.randn(2 * 6 * 16 + 1)[1:].view(2, 6, 16).transpose(1, 2),
        torch.randn(1, 1, 16).expand(2, 6, 16).transpose(1, 2),
    ],
    ids=["channels last", "positions last", "a part", "odd strides", "an odd address", "expanded"],
)
def test_what_the_package_can_not_read_is_copied(x, channels_last):
    found = _laid_out(x, channels_last)
    assert torch.equal(found, x) and found.data_ptr() % 16 == 0
    if channels_last:
        assert found.stride(1) == 1 and found.stride(2) >= 16 and not any(size % 8 for size in found.stride()[::2])
    else:
        assert found.is_contiguous()


def test_what_the_package_can_read_is_not_copied():
    rows = torch.randn(2, 6, 24).transpose(1, 2)
    assert _laid_out(rows, True).data_ptr() == rows.data_ptr()
    part = rows[:, 8:]
    assert _laid_out(part, True).data_ptr() == part.data_ptr()
