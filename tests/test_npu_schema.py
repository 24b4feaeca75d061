"""The simulated operators against the real library: their schemas string for string, their results' shapes and dtypes.

Needs the wheel of torch-npu, which is downloaded once; nothing of it runs but what describes its operators.
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map

import torch_npu_wheel
from npu_sim import simulated_npu
from npu_sim.operators import SCHEMAS

pytestmark = [pytest.mark.npu_schema, pytest.mark.npu_simulated, pytest.mark.thorough]

PLUGIN = Path(__file__).parents[1] / "plugins/ascend_npu/src/veomni_npu"
CALLED = re.compile(r"\bnpu\.(npu_\w+)")


def differences(name: str, schema: str) -> list[str]:
    """Where the library has another schema for the operator ``name``."""
    sources = {"registers": torch_npu_wheel.registered_schemas(), "declares": torch_npu_wheel.declared_schemas()}
    return [
        f"the library {verb} {schemas.get(name)}, not {name}{schema}"
        for verb, schemas in sources.items()
        if schemas.get(name) != name + schema
    ]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_simulated_operator_has_the_librarys_schema(name):
    assert not differences(name, SCHEMAS[name])


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_registered_is_that_schema(name):
    with simulated_npu():
        registered = getattr(torch.ops.npu, name).default._schema
    assert registered == torch._C.parse_schema(f"npu::{torch_npu_wheel.registered_schemas()[name]}")


@pytest.mark.parametrize(
    "right,wrong",
    [
        ("epsilon=1e-06", "epsilon=1e-05"),
        ("Tensor gamma", "Tensor? gamma"),
        ("gamma", "weight"),
        ("(Tensor, Tensor)", "Tensor"),
    ],
)
def test_a_wrong_schema_is_noticed(right, wrong):
    schema = SCHEMAS["npu_rms_norm"]
    assert schema != schema.replace(right, wrong)
    assert len(differences("npu_rms_norm", schema.replace(right, wrong))) == 2
    assert differences("npu_rms_norms", schema)


def test_every_operator_that_the_plugin_calls_is_checked():
    called = {name for path in PLUGIN.rglob("*.py") for name in CALLED.findall(path.read_text())}
    assert called
    assert called <= set(SCHEMAS)


FOR_LINEAR_ATTENTION = re.compile(r"npu_\w*(causal_conv|gated_delta_rule)\w*")


def test_no_operator_for_linear_attention_trains_a_model_of_today():
    """What docs/how-to/ascend.md says of them. Where this fails, one of them may be what a kernel can call."""
    names = {name for name in torch_npu_wheel.registered_schemas() if FOR_LINEAR_ATTENTION.fullmatch(name)}
    assert {name for name in names if name.endswith("_backward")} == {"npu_masked_causal_conv1d_backward"}
    for name in ("npu_fused_causal_conv1d", "npu_masked_causal_conv1d"):
        documented = torch_npu_wheel.documentation(name)
        assert re.findall(r"支持的型号.\s*(.*)", documented) == ["昇腾950 AI处理器"]  # its products
        assert "固定为3" in documented  # the width
        assert "float16、bfloat16" in documented and "float32" not in documented
    masked = torch_npu_wheel.registered_schemas()["npu_masked_causal_conv1d"]
    assert {each.name for each in torch._C.parse_schema(masked).arguments} == {"input", "weight", "mask"}


def meta_function(name: str):
    """The library's meta registration of the operator ``name``, without the library."""
    tree = ast.parse(torch_npu_wheel.meta_registrations())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and name in [_registered_name(mark) for mark in node.decorator_list]:
            node.decorator_list = []
            # What the functions ask of the library: number formats of quantised products, and text for errors.
            formats = ("hifloat8", "float4_e2m1fn_x2", "float4_e1m2fn_x2", "float8_e8m0fnu")
            namespace = {
                "torch": torch,
                "math": math,
                "torch_npu": SimpleNamespace(**{format: object() for format in formats}),
                "gmm_get_dtype": lambda dtype: dtype,
                "is_transpose_weight": lambda weight: False,
                "_warn_npu_fusion_attention_compile_once": lambda: None,
            }
            exec(compile(ast.Module([node], []), "_meta_registrations.py", "exec"), namespace)
            return namespace[node.name]
    raise LookupError(name)


def _registered_name(decorator: ast.expr) -> str | None:
    """``name`` of ``@impl(m, "name")``."""
    arguments = decorator.args if isinstance(decorator, ast.Call) else []
    return arguments[1].value if len(arguments) == 2 and isinstance(arguments[1], ast.Constant) else None


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype)


ORDER = torch.tensor([0, 3, 1, 4, 2, 5], dtype=torch.int32)
GROUPS = {"group_list": torch.tensor([2, 6]), "split_item": 2}
HEADS = (normal(2, 4, 5, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8))
SAVED = {
    "softmax_max": torch.zeros(2, 4, 5, 8),
    "softmax_sum": torch.ones(2, 4, 5, 8),
    "attention_in": normal(2, 4, 5, 8),
}
CALLS = [
    ("npu_rms_norm", (normal(2, 3, 8), normal(8)), {}),
    ("npu_rms_norm_backward", (normal(2, 3, 8), normal(2, 3, 8), normal(8), torch.ones(2, 3, 1)), {}),
    ("npu_rotary_mul", (normal(2, 4, 5, 8), normal(1, 1, 5, 8), normal(1, 1, 5, 8)), {}),
    ("npu_rotary_mul_backward", (*2 * [normal(2, 4, 5, 8)], *2 * [normal(2, 1, 5, 8)]), {}),
    ("npu_swiglu", (normal(3, 8),), {}),
    ("npu_swiglu", (normal(6, 4), 0), {}),
    ("npu_swiglu_backward", (normal(3, 4), normal(3, 8)), {}),
    ("npu_moe_token_permute", (normal(3, 8), torch.tensor([[0, 1], [0, 1], [1, 0]])), {}),
    ("npu_moe_token_permute", (normal(3, 8), torch.tensor([1, 0, 1]), 2), {}),
    ("npu_moe_token_permute", (normal(3, 8), torch.tensor([1, 0, 1]), -2), {}),
    ("npu_moe_token_permute_grad_v2", (normal(6, 8), ORDER, 3, torch.bfloat16, 2), {}),
    ("npu_moe_token_unpermute", (normal(6, 8), ORDER, normal(3, 2)), {}),
    ("npu_moe_token_unpermute", (normal(6, 8), ORDER), {}),
    ("npu_moe_token_unpermute_grad", (normal(6, 8), normal(3, 8), ORDER, normal(3, 2)), {}),
    ("npu_grouped_matmul", ([normal(6, 8)], [normal(2, 8, 4)]), {"group_type": 0, **GROUPS}),
    ("npu_grouped_matmul", ([normal(6, 8).t()], [normal(6, 4)]), {"group_type": 2, **GROUPS}),
    ("npu_fusion_attention", (*HEADS, 4, "BNSD"), {}),
    ("npu_fusion_attention", (*(heads.transpose(1, 2).flatten(2) for heads in HEADS), 4, "BSH"), {}),
    (
        "npu_fusion_attention",
        (*3 * [normal(7, 4, 8)], 4, "TND"),
        {"actual_seq_qlen": [3, 7], "actual_seq_kvlen": [3, 7]},
    ),
    ("npu_fusion_attention_grad", (*HEADS, normal(2, 4, 5, 8), 4, "BNSD"), SAVED),
]


def described(result):
    """Shapes and dtypes of the tensors among an operator's results."""
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return [(tuple(t.shape), t.dtype) for t in tensors if isinstance(t, torch.Tensor)]


def on_npu(arguments):
    return tree_map(lambda value: value.to("npu") if isinstance(value, torch.Tensor) else value, arguments)


def test_every_simulated_operator_is_called():
    assert {name for name, _, _ in CALLS} == set(SCHEMAS)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("name,args,kwargs", CALLS)
def test_results_have_the_shapes_and_dtypes_of_the_meta_registration(name, args, kwargs):
    with simulated_npu():
        simulated = getattr(torch.ops.npu, name)(*on_npu(args), **on_npu(kwargs))
    assert described(simulated) == described(meta_function(name)(*args, **kwargs))
