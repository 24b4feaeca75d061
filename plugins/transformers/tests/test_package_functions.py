"""Probes call no function of a package for GPUs that transformers chose: its kernels can't run on what probes have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers.models.qwen3_next import modeling_qwen3_next

from delta_rule_models import family
from veomni_core import find_sites
from veomni_transformers.captured_cells import captured_cell
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import within_layer
from veomni_transformers.proving.hollow_twin import hollow_twin
from veomni_transformers.proving.package_functions import PACKAGES, leave_out_packages


def hybrid() -> nn.Module:
    return family("qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


def evidence(model: nn.Module) -> dict[str, str]:
    return {f"{site.op_name} {site.path}": site.evidence for site in find_sites(model)}


@pytest.fixture
def calls() -> Iterator[list[torch.device]]:
    """Makes transformers' own decorator call a package's function, as where fla is installed: where it was called."""
    seen: list[torch.device] = []

    def chunk_gated_delta_rule(query: torch.Tensor, *_: object, **__: object) -> None:
        seen.append(query.device)
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    function = within_layer(getattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", None))
    cell = captured_cell(function, "implementation") if function else None
    if cell is None:
        pytest.skip("these transformers choose as a layer is made; the test of attributes asks that")
    before = cell.cell_contents
    cell.cell_contents = chunk_gated_delta_rule
    yield seen
    cell.cell_contents = before


def test_a_model_is_proven_as_without_the_package_and_nothing_of_it_is_called(calls):
    model = hybrid()
    cell = captured_cell(within_layer(modeling_qwen3_next.torch_chunk_gated_delta_rule), "implementation")
    chosen, cell.cell_contents = cell.cell_contents, modeling_qwen3_next.torch_chunk_gated_delta_rule.__wrapped__
    plain = evidence(model)
    cell.cell_contents = chosen
    found = evidence(model)
    assert not calls
    told = "; in its place the model would run fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule"
    assert {key: said.removesuffix(told) for key, said in found.items()} == plain
    assert any(said.endswith(told) for said in found.values())
    assert any(key.startswith("attention") and "gave the reference's values" in said for key, said in found.items())


def test_the_model_itself_still_calls_the_package(calls):
    model = hybrid()
    find_sites(model)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False)
    assert calls


def of_a_package(name: str):
    def function(x):
        raise AssertionError("the package's function was called")

    function.__module__ = name
    return function


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_an_attribute_is_the_file_s_own_function_or_none(package, monkeypatch):
    home = ModuleType("a_modeling_file")
    monkeypatch.setitem(sys.modules, home.__name__, home)
    home.torch_scan = torch.sin

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scan, self.convolve = of_a_package(f"{package}.ops"), of_a_package(package)
            self.shift = of_a_package("somebody.else")

        def forward(self, x):
            return self.scan(x), self.convolve

    Mixer.__module__ = home.__name__
    mixer = Mixer()
    with probe.seeded():
        twin = hollow_twin(mixer)
    values, convolve = twin(torch.ones(2))
    torch.testing.assert_close(values, torch.sin(torch.ones(2)))
    assert convolve is None and twin.shift is mixer.shift
    assert mixer.scan.__module__ == f"{package}.ops" and mixer.convolve is not None


def test_a_package_s_module_raises_in_a_probe_and_is_itself_elsewhere():
    norm = nn.LayerNorm(4)

    class FusedRMSNormGated(nn.LayerNorm):
        pass

    FusedRMSNormGated.__module__ = "fla.modules.fused_norm_gate"
    fused = FusedRMSNormGated(4)
    twin = probe.bare_copy(fused)
    leave_out_packages(twin)
    with pytest.raises(RuntimeError, match="FusedRMSNormGated is code of the package fla, which runs on its own"):
        twin(torch.ones(4))
    torch.testing.assert_close(fused(torch.ones(2, 4)), norm(torch.ones(2, 4)))
