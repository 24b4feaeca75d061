"""``veomni verify --compile-for``: Triton's kernels are compiled for a GPU that isn't here."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from veomni_conformance.triton_ahead import lacking
from veomni_conformance.triton_targets import Target
from veomni_core.descriptions.hardware import Hardware

pytest.importorskip("triton", reason="Triton is not installed")

PLUGIN = """
import torch
import triton
from triton import language as tl

from veomni_core import HardwareRequirement, KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1


@triton.jit
def silu(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, at < size, 0.0).to(tl.float32)
    up = tl.load(up_ptr + at, at < size, 0.0).to(tl.float32)
    tl.store(out_ptr + at, gate * tl.sigmoid(gate) * up, at < size)


@triton.jit
def product(a_ptr, b_ptr, out_ptr, steps, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    rows, depth = tl.arange(0, SIDE), tl.arange(0, DEPTH)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for step in range(steps):  # each of its stages keeps both operands in shared memory
        a = tl.load(a_ptr + rows[:, None] * DEPTH + depth[None, :] + step * SIDE * DEPTH)
        b = tl.load(b_ptr + depth[:, None] * SIDE + rows[None, :] + step * SIDE * DEPTH)
        total += tl.dot(a, b)
    tl.store(out_ptr + rows[:, None] * SIDE + rows[None, :], total)


@triton.jit
def wrong(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.no_such_function(1.0))


def right_kernel(gate, up):
    out = torch.empty_like(gate)
    silu[(triton.cdiv(gate.numel(), 256),)](gate, up, out, gate.numel(), BLOCK=256)
    return out


def large_kernel(gate, up):
    out = torch.empty_like(gate)
    product[(1,)](gate, up, out, 8, SIDE=64, DEPTH=64, num_stages=5)
    return out


def wrong_kernel(gate, up):
    out = torch.empty_like(gate)
    wrong[(1,)](out, BLOCK=16)
    return out


def asking_kernel(gate, up):
    # What it asks of Triton's driver decides the width of its blocks.
    driver = triton.runtime.driver.active
    block = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"] // 1024
    block = triton.next_power_of_2(block) * (2 if driver.get_current_target().backend == "hip" else 1)
    out = torch.empty_like(gate)
    silu[(triton.cdiv(gate.numel(), block),)](gate, up, out, gate.numel(), BLOCK=block)
    return out


def stopping_kernel(gate, up):
    out = right_kernel(gate, up)
    raise RuntimeError("the first value decides what follows")


@hookimpl
def veomni_kernels():
    needs = HardwareRequirement("cuda", min_compute_capability=80) | HardwareRequirement("rocm")
    return [
        KernelSpec(name, "swiglu_mlp", "standard", f"{module}:{name}_kernel", hardware=needs, backward=False)
        for name in ("right", "large", "wrong", "asking", "stopping")
    ]
"""


@pytest.fixture
def compiled(veomni, install, monkeypatch):
    """The rows of ``veomni verify --compile-for``, by kernel, and the exit code."""
    install("acme-triton", PLUGIN)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as in these tests; the command compiles all the same

    def run(kernel, target, code=0):
        arguments = ("acme-triton", "--kernel", kernel, "--dtype", "float32", "--compile-for", target, "--json")
        said, _ = json.JSONDecoder().raw_decode(veomni("verify", *arguments, code=code))  # an error may follow
        (row,) = said["results"]
        return row

    return run


def test_a_kernel_is_compiled_for_a_gpu_that_is_not_here(compiled):
    row = compiled("right", "sm90")
    assert row["result"] == "ok" and row["detail"] == []
    assert {each["name"] for each in row["functions"]} == {"silu"}
    assert all("BLOCK=256" in each["constants"] and each["warps"] == 4 for each in row["functions"])
    assert all(8 <= each["registers"] <= 255 and each["spilled_bytes"] == 0 for each in row["functions"])


@pytest.mark.thorough
def test_what_the_gpu_has_no_room_for_fails_there_and_not_elsewhere(compiled):
    small = compiled("large", "sm89", code=1)
    assert small["result"] == "FAILED"
    assert "bytes of shared memory, and a block of sm89 has 101,376" in small["detail"][0]
    assert small["functions"][0]["shared_bytes"] > 101_376


@pytest.mark.thorough
def test_a_kernel_is_compiled_for_gpus_of_amd(compiled):
    row = compiled("right", "mi300x")
    assert row["result"] == "ok" and {each["name"] for each in row["functions"]} == {"silu"}
    assert all(8 <= each["registers"] <= 512 and each["spilled_bytes"] == 0 for each in row["functions"])
    large = compiled("large", "mi300x", code=1)
    assert "bytes of shared memory, and a block of gfx942 has 65,536" in large["detail"][0]


def test_tensor_memory_that_a_block_lacks_is_named():
    target = Target.of(Hardware.named("b200"))
    assert (
        lacking(SimpleNamespace(shared=0, tmem_size=1024), target)
        == "needs 1024 columns of tensor memory, and a block of sm100 has 512"
    )
    assert not lacking(SimpleNamespace(shared=0, tmem_size=512), target)
    assert not lacking(SimpleNamespace(shared=0), Target.of(Hardware.named("h200")))


@pytest.mark.thorough
def test_host_code_may_ask_tritons_driver_about_the_gpu(compiled):
    blocks = {"sm89": "BLOCK=128", "sm90": "BLOCK=256", "mi300x": "BLOCK=128"}
    for target, block in blocks.items():
        assert all(block in each["constants"] for each in compiled("asking", target)["functions"]), target


@pytest.mark.thorough
def test_what_does_not_compile_fails_with_the_compilers_words(compiled):
    row = compiled("wrong", "h200", code=1)
    assert row["result"] == "FAILED" and not row["functions"]
    assert any("no_such_function" in each for each in row["detail"])


@pytest.mark.thorough
def test_where_the_host_code_ended_is_said(compiled):
    row = compiled("stopping", "sm90")
    assert row["result"] == "ok" and row["functions"]
    assert any("not reached: " in each and "the first value decides" in each for each in row["detail"])


@pytest.mark.thorough
def test_a_kernel_for_other_gpus_is_skipped_and_other_hardware_refused(veomni, compiled):
    assert compiled("right", "t4", code=1)["result"] == "skipped"
    for target in ("cpu", "mps"):
        said = veomni("verify", "acme-triton", "--compile-for", target, code=2)
        assert "kernels are compiled for GPUs of NVIDIA and AMD: write sm90, h200, mi300x" in " ".join(said.split())
    said = veomni("verify", "acme-triton", "--compile-for", "sm90", "--device", "cpu", code=2)
    assert "it takes neither --device nor --certify" in " ".join(said.split())


@pytest.mark.thorough
def test_the_table_shows_the_most_that_each_function_uses(veomni, install):
    install("acme-triton", PLUGIN)
    text = veomni("verify", "acme-triton", "--kernel", "right", "--dtype", "float32", "--compile-for", "sm90")
    assert "compiled for cuda 9.0 (sm90)" in text and text.count("│ silu") == 1
