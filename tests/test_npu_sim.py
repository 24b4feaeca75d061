"""The simulated NPU itself: a device like another, operators that compute their formulas, limits that hold."""

from __future__ import annotations

import gc
import importlib.util
import sys

import pytest
import torch
from torch.nn import functional as F

from npu_sim import memory, simulated_npu

npu = torch.ops.npu
HALF = torch.float16
pytestmark = pytest.mark.npu_simulated


@pytest.fixture(autouse=True)
def _simulated():
    with simulated_npu():
        yield


def normal(*shape, dtype=torch.float32, device="npu"):
    return torch.randn(shape, dtype=dtype, device=device)


class TestDevice:
    def test_it_is_gone_where_the_simulation_ends(self):
        with simulated_npu():
            assert torch.npu.is_available() and torch.npu.device_count() == 1
        assert not torch.npu.is_available() and torch.npu.device_count() == 0
        assert "torch_npu" not in sys.modules

    def test_views_share_memory(self):
        x = torch.zeros(4, 6, device="npu")
        x[1:3].t()[2:].add_(1)
        x.view(2, 12)[0, 0] = 5
        assert x.sum().item() == 8 + 5
        assert x[1:3].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

    def test_results_written_out_are_resized(self):
        out = torch.empty(0, device="npu")
        assert torch.add(torch.ones(3, device="npu"), 1, out=out) is out
        assert out.tolist() == [2, 2, 2]
        assert torch.arange(4, device="npu").tolist() == [0, 1, 2, 3]

    def test_a_tensor_of_the_host_and_one_of_the_device_don_t_mix(self):
        with pytest.raises(RuntimeError, match="npu"):
            normal(2, 3) @ normal(3, 2, device="cpu")

    def test_memory_is_given_back(self):
        for _ in range(5000):
            normal(8)
        gc.collect()
        assert len(memory._blocks._blocks) < 4000


def rms_norm(x, gamma):
    return npu.npu_rms_norm(x, gamma, 1e-6)[0]


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def attention(query, key, value):
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=query.device).triu(1)
    return npu.npu_fusion_attention(query, key, value, 4, "BNSD", atten_mask=mask, scale=0.3, sparse_mode=3)[0]


def attention_of_packed(query, key, value):
    """Two sequences of 2 and 5 tokens, in [T, N, D]."""
    packed = npu.npu_fusion_attention(
        query, key, value, 4, "TND", scale=0.3, actual_seq_qlen=[2, 7], actual_seq_kvlen=[2, 7]
    )
    return packed[0]


def attention_of_each(query, key, value):
    def one(tokens):
        heads = (tensor[tokens].transpose(0, 1) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(*heads, scale=0.3, enable_gqa=True).transpose(0, 1)

    return torch.cat([one(slice(0, 2)), one(slice(2, 7))])


def causal(query, key, value):
    ahead = torch.arange(key.shape[2]) - torch.arange(query.shape[2]).unsqueeze(1)
    keep = ahead <= key.shape[2] - query.shape[2]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=keep, scale=0.3, enable_gqa=True)


INDICES = torch.tensor([[0, 2], [2, 0], [1, 2]])


def there_and_back(tokens, probs):
    permuted, order = npu.npu_moe_token_permute(tokens, INDICES.to(tokens.device))
    return npu.npu_moe_token_unpermute(permuted, order, probs)


FORMULAS = [
    (rms_norm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), [(2, 3, 8), (8,)]),
    (rms_norm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), [(5, 3, 8), (3, 8)]),
    (lambda x: npu.npu_swiglu(x), lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], [(2, 3, 8)]),
    (lambda *tensors: npu.npu_rotary_mul(*tensors), rotated, [(2, 4, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8)]),
    (attention, causal, [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)]),
    (attention_of_packed, attention_of_each, [(7, 4, 8), (7, 2, 8), (7, 2, 8)]),
    (there_and_back, lambda tokens, probs: tokens * probs.sum(1, keepdim=True), [(3, 8), (3, 2)]),
]


@pytest.mark.parametrize("operator,formula,shapes", FORMULAS)
def test_an_operator_and_its_backward_compute_the_formula(operator, formula, shapes):
    inputs = [normal(*shape, device="cpu").requires_grad_() for shape in shapes]
    moved = [tensor.detach().to("npu").requires_grad_() for tensor in inputs]
    wanted, found = formula(*inputs), operator(*moved)
    torch.testing.assert_close(found.cpu(), wanted)
    upstream = torch.randn_like(wanted)
    gradients = torch.autograd.grad(found, moved, upstream.to("npu"))
    for gradient, exact in zip(gradients, torch.autograd.grad(wanted, inputs, upstream), strict=True):
        torch.testing.assert_close(gradient.cpu(), exact)


def test_permuting_sorts_tokens_by_expert():
    tokens = torch.arange(3.0, device="npu").unsqueeze(1).requires_grad_()
    permuted, order = npu.npu_moe_token_permute(tokens, INDICES.to("npu"), 4)
    assert permuted.flatten().tolist() == [0, 1, 2, 0]
    assert order.tolist() == [0, 3, 4, 1, 2, 5]
    permuted.sum().backward()
    assert tokens.grad.flatten().tolist() == [2, 1, 1]


def test_grouped_products():
    x, weight, grad = normal(6, 8), normal(3, 8, 4), normal(6, 4)
    ends, counts = torch.tensor([2, 2, 6], device="npu"), torch.tensor([2, 0, 4], device="npu")
    rows = npu.npu_grouped_matmul([x], [weight], group_list=ends, group_type=0, split_item=2)[0]
    torch.testing.assert_close(rows, torch.cat((x[:2] @ weight[0], x[2:] @ weight[2])))
    options = {"group_list": counts, "group_list_type": 1, "group_type": 2, "split_item": 3}
    columns = npu.npu_grouped_matmul([x.t()], [grad], **options)[0]
    torch.testing.assert_close(columns, torch.stack((x[:2].t() @ grad[:2], normal(8, 4) * 0, x[2:].t() @ grad[2:])))


def grouped(x, weight, ends=(2, 6), **options):
    group_list = torch.tensor(ends, device="npu", dtype=options.pop("dtype", torch.int64))
    options = {"group_type": 0, "split_item": 2, "group_list": group_list, **options}
    return npu.npu_grouped_matmul([x], [weight], **options)


def attend(q, k=None, heads=4, layout="BNSD", **options):
    k = q if k is None else k
    return npu.npu_fusion_attention(q, k, k, heads, layout, **options)


BEYOND_LIMITS = {
    "norm of float64": (lambda: rms_norm(normal(2, 8, dtype=torch.float64), normal(8)), "supports float16"),
    "norm of one axis": (lambda: rms_norm(normal(8), normal(8)), "must have"),
    "norm of another width": (lambda: rms_norm(normal(2, 8), normal(4)), "is not the end of self's shape"),
    "swiglu of odd width": (lambda: npu.npu_swiglu(normal(2, 7)), "odd size 7"),
    "swiglu of whole numbers": (lambda: npu.npu_swiglu(torch.ones(2, 4, device="npu").int()), "supports float16"),
    "rotary of three axes": (lambda: npu.npu_rotary_mul(*3 * [normal(4, 5, 8)]), r"must have \(4,\) dimensions"),
    "rotary of odd heads": (lambda: npu.npu_rotary_mul(*3 * [normal(2, 4, 5, 7)]), "D must be even"),
    "rotary of wide heads": (lambda: npu.npu_rotary_mul(*3 * [normal(1, 1, 2, 896)]), "below 896"),
    "rotary of two dtypes": (
        lambda: npu.npu_rotary_mul(normal(2, 4, 5, 8, dtype=HALF), *2 * [normal(1, 1, 5, 8)]),
        "dtypes must be equal",
    ),
    "rotary of another broadcast": (
        lambda: npu.npu_rotary_mul(normal(2, 4, 5, 8), *2 * [normal(1, 4, 5, 8)]),
        "in no layout",
    ),
    "rotary of a thousand": (
        lambda: npu.npu_rotary_mul(normal(1000, 1, 1, 2), *2 * [normal(1, 1, 1, 2)]),
        "in no layout",
    ),
    "rotary tables' gradient": (
        lambda: npu.npu_rotary_mul(normal(33, 32, 1, 2), *2 * [normal(1, 1, 1, 2).requires_grad_()]),
        "at most 1024",
    ),
    "permute by float": (lambda: npu.npu_moe_token_permute(normal(3, 8), normal(3, 2)), "supports int32, int64"),
    "permute by a negative": (
        lambda: npu.npu_moe_token_permute(normal(3, 8), -torch.ones(3, 2, device="npu").long()),
        "must be in",
    ),
    "permute padded": (
        lambda: npu.npu_moe_token_permute(normal(3, 8), INDICES.to("npu"), None, True),
        "only padded_mode=False",
    ),
    "unpermute by int64": (
        lambda: npu.npu_moe_token_unpermute(normal(2, 8), torch.tensor([0, 1], device="npu")),
        "sorted_indices supports int32",
    ),
    "unpermute twice the same": (
        lambda: npu.npu_moe_token_unpermute(normal(2, 8), torch.tensor([0, 0], device="npu").int()),
        "every index from 0 to 1 once",
    ),
    "groups that end early": (lambda: grouped(normal(6, 8), normal(2, 8, 4), (2, 5)), "reaches 5"),
    "groups that go back": (lambda: grouped(normal(6, 8), normal(3, 8, 4), (4, 2, 6)), "negative group"),
    "groups of int32": (lambda: grouped(normal(6, 8), normal(2, 8, 4), dtype=torch.int32), "supports int64"),
    "groups without type": (lambda: grouped(normal(6, 8), normal(2, 8, 4), group_type=None), "not None"),
    "one count": (lambda: grouped(normal(6, 8), normal(1, 8, 4), (6,), group_list_type=1), "more than one entry"),
    "many groups": (lambda: grouped(normal(6, 8), normal(1025, 8, 1), 1025 * (6,)), "at most 1024 groups"),
    "groups of a transposed x": (lambda: grouped(normal(8, 6).t(), normal(2, 8, 4)), "must not be transposed"),
    "reduced groups of a plain x": (lambda: grouped(normal(8, 6), normal(6, 4), group_type=2), "must be a transposed"),
    "products of two dtypes": (lambda: grouped(normal(6, 8, dtype=HALF), normal(2, 8, 4)), "dtypes must be equal"),
    "attention in no layout": (lambda: attend(normal(2, 4, 5, 8), layout="BSDN"), "input_layout must be one of"),
    "attention of other heads": (lambda: attend(normal(2, 4, 5, 8), heads=3), "head_num 3"),
    "attention of no groups": (lambda: attend(normal(2, 4, 5, 8), normal(2, 3, 5, 8)), "no multiple of 3"),
    "attention of wide heads": (lambda: attend(normal(1, 4, 1, 776)), "D up to 768"),
    "packed without lengths": (lambda: attend(normal(7, 4, 8), layout="TND"), "TND needs actual_seq_qlen"),
    "packed with other lengths": (
        lambda: attend(normal(7, 4, 8), layout="TND", actual_seq_qlen=[2, 6], actual_seq_kvlen=[2, 7]),
        "ends at 6",
    ),
    "mask of floats": (lambda: attend(normal(2, 4, 5, 8), atten_mask=normal(5, 5)), "supports bool, uint8"),
    "mask of another shape": (
        lambda: attend(normal(2, 4, 5, 8), atten_mask=torch.ones(3, 1, 5, 5, device="npu").bool()),
        "one of the shapes",
    ),
    "causal without the triangle": (
        lambda: attend(normal(2, 4, 5, 8), atten_mask=torch.ones(5, 5, device="npu").bool().triu(1), sparse_mode=3),
        "2048 x 2048",
    ),
}


@pytest.mark.parametrize("case", BEYOND_LIMITS)
def test_a_call_beyond_a_limit_fails(case):
    call, message = BEYOND_LIMITS[case]
    with pytest.raises(RuntimeError, match=message):
        call()


def test_a_group_list_on_the_host_is_not_what_the_schema_takes():
    with pytest.raises(RuntimeError, match="group_list"):
        npu.npu_grouped_matmul([normal(6, 8)], [normal(2, 8, 4)], group_list=[2, 6], group_type=0)


def test_lengths_on_the_device_are_not_what_the_schema_takes():
    with pytest.raises(RuntimeError, match="actual_seq_qlen"):
        attend(normal(7, 4, 8), layout="TND", actual_seq_qlen=torch.tensor([2, 7]), actual_seq_kvlen=[2, 7])


def test_torch_npu_can_be_found_and_imported():
    assert importlib.util.find_spec("torch_npu")
    import torch_npu

    assert torch_npu.npu_swiglu is npu.npu_swiglu
