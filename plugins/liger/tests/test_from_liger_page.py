"""The page from-liger.md: each way to patch, and what takes its place, train with the same losses.

Liger's kernels run in Triton's interpreter here, on both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.integrations.liger import apply_liger_kernel
from transformers.models.llama import modeling_llama

import veomni_core
from migrations import assert_same_losses, blocks, losses, names_of, save_my_llama
from veomni_conformance.given_kernels import definitions
from veomni_core import HardwareRequirement, binding_of
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import VeOmniError
from veomni_liger.plugin import veomni_kernels

*BEFORES, AFTER = blocks("from-liger.md", "python")

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="a GPU rounds float32 products otherwise than the interpreter"
    ),
    pytest.mark.docs,
]


@pytest.fixture(autouse=True)
def _in_the_page_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_my_llama(tmp_path)


@pytest.fixture
def patches() -> Iterator[pytest.MonkeyPatch]:
    """What Liger patches in the process, to be undone."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
            patched.setattr(modeling_llama, name, getattr(modeling_llama, name))
        head = modeling_llama.LlamaForCausalLM
        patched.setattr(head, "forward", head.forward)
        yield patched


@pytest.fixture
def bound_losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses of what the page shows after, with Liger's kernels usable in the interpreter."""
    kernels = tuple(replace(spec, hardware=HardwareRequirement()) for spec in veomni_kernels())
    record = PluginRecord("liger", "veomni-liger", "0", "veomni_liger.plugin", kernels=kernels)
    on_the_cpu = functools.partial(veomni_core.bind, registry=build_registry([*definitions(), record], {}))
    monkeypatch.setattr(veomni_core, "bind", on_the_cpu, raising=False)
    model = names_of(AFTER)["model"]
    asked = [op for op in binding_of(model).plan.ops if op.written]
    assert len(asked) == 4
    assert all(site.bound for op in asked for site in op.sites)
    return losses(model)


@pytest.mark.parametrize("before", BEFORES, ids=["the function", "the class", "Trainer's argument"])
def test_before_and_after_give_the_same_losses(
    before: str, bound_losses: list[float], patches: pytest.MonkeyPatch
) -> None:
    shown = names_of(before)
    if "trainer" in shown:  # as `Trainer.train` begins
        assert shown["trainer"].args.use_liger_kernel
        apply_liger_kernel(shown["model"], shown["trainer"].args.liger_kernel_config)
    assert "liger" in shown["model"].model.norm.forward.__func__.__module__
    assert_same_losses(bound_losses, losses(shown["model"]))


def test_a_patched_model_is_refused_as_the_page_says(patches: pytest.MonkeyPatch) -> None:
    model = names_of(BEFORES[0])["model"]
    with pytest.raises(VeOmniError, match="torch covers none of the 3 sites: not proven: standard: gives"):
        veomni_core.bind(model, {"preset": "eager", "rms_norm_implementation": "torch"})
