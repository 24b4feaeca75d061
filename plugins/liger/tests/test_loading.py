"""What the plugin says without its library, with another version of it, and under its environment switches."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veomni_conformance.given_kernels import definitions
from veomni_core import Hardware, OpsConfig, Site, plan_sites
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import KernelUnavailableError
from veomni_liger.plugin import veomni_kernels
from veomni_ops.head_chunks import LOGITS_BYTES, chunks

RECORD = PluginRecord("liger", "veomni-liger", "0", "veomni_liger.plugin", kernels=tuple(veomni_kernels()))
REGISTRY = build_registry([*definitions(), RECORD], {})
VARIANTS = {
    "rms_norm": "cast_after",
    "rotary_pos_emb": "full",
    "swiglu_mlp": "standard",
    "cross_entropy_loss": "causal",
    "moe_experts": "standard",
}
SITES = tuple(Site(op, op, "a rule", variant, "proven", "bfloat16") for op, variant in VARIANTS.items())
FIELDS = {REGISTRY.ops[op].config_field: "liger_kernel" for op in VARIANTS} | {"moe_implementation": "fused_liger"}


def plan(hardware):
    config = OpsConfig.from_dict({"preset": "eager", **FIELDS}, REGISTRY, environ={})
    return plan_sites(SITES, config, registry=REGISTRY, hardware=hardware)


def run(code, **environment):
    """What a Python process of its own prints for ``code``."""
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LIGER_")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, env={**clean, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_value_of_the_seed_documents_is_planned_for_an_h200_and_assumes_the_library():
    result = plan("h200")
    assert {site.kernel for op in result.ops for site in op.sites} == {"liger_kernel", "fused_liger"}
    assert "rms_norm/cast_after:liger_kernel: liger-kernel>=0.8.5,<0.9" in result.assumptions


@pytest.mark.parametrize(
    "version, why_not",
    [
        (None, "which is not installed"),
        ("0.7.0", "0.7.0 is installed"),
        ("0.8.4", "0.8.4 is installed"),
        ("0.9.0", "0.9.0 is installed"),
    ],
)
def test_a_library_that_is_missing_too_old_or_too_new_is_refused_before_anything_is_built(
    version, why_not, monkeypatch
):
    monkeypatch.setattr("veomni_core.descriptions.hardware._installed_version", lambda _: version)
    here = Hardware("cuda", 90, name="NVIDIA H200", detected=True)
    with pytest.raises(KernelUnavailableError) as raised:
        plan(here)
    lines = str(raised.value).splitlines()
    assert len(lines) == len(FIELDS)
    assert all(f"needs liger-kernel>=0.8.5,<0.9, {why_not}. Usable: eager." in line for line in lines)


@pytest.mark.thorough
def test_the_plugin_describes_itself_without_the_library_and_says_what_to_do_when_it_is_half_installed():
    printed = run(
        """
        import sys

        sys.modules["liger_kernel"] = None  # its distribution is listed, its package is gone
        from veomni_core.errors import KernelLoadError
        from veomni_liger.plugin import veomni_kernels

        specs = veomni_kernels()
        assert specs and not {"torch", "triton"} & sys.modules.keys()
        for spec in specs:
            try:
                spec.load()
            except KernelLoadError as error:
                assert "liger-kernel 0.8" in str(error) and "install it again: pip install" in str(error), error
            else:
                raise AssertionError(spec)
        print(len(specs))
        """
    )
    assert int(printed) == len(veomni_kernels())


CALLED = """
from veomni_liger import cross_entropy_loss, moe_experts, pinned_experts, rms_norm, rotary_pos_emb, swiglu_mlp

print(rms_norm._apply.__self__.__base__, cross_entropy_loss._losses_and_dlogits, cross_entropy_loss._cross_entropy)
print(rotary_pos_emb._rope_forward, rotary_pos_emb._rope_backward, *swiglu_mlp._KERNELS.values())
for name in pinned_experts.CONFIGURATIONS:
    print(name, moe_experts._apply.__self__.forward.__wrapped__.__globals__[name]._configuration)
"""


@pytest.mark.thorough
def test_liger_s_environment_switches_do_not_change_what_is_called(capsys):
    switches = {
        "LIGER_KERNEL_BACKEND": "cutile",
        "LIGER_KERNEL_IMPL_RMS_NORM": "nvidia-cutedsl",
        "LIGER_KERNEL_BACKEND_ROPE": "cutedsl",
        "LIGER_KERNEL_STRICT": "1",
        "LIGER_FUSED_MOE_AUTOTUNE": "0",
    }
    exec(CALLED, {})
    plain = _without_addresses(capsys.readouterr().out)
    assert "liger_kernel.ops.rms_norm.LigerRMSNormFunction" in plain
    assert _without_addresses(run(CALLED, **switches)) == plain


def _without_addresses(text):
    return " ".join(word for word in text.split() if not word.startswith("0x"))


@pytest.mark.thorough
def test_a_switch_with_which_liger_itself_does_not_load_is_named():
    printed = run(
        """
        from veomni_core.errors import KernelLoadError
        from veomni_liger.plugin import veomni_kernels

        try:
            veomni_kernels()[0].load()
        except KernelLoadError as error:
            print(error)
        """,
        LIGER_KERNEL_IMPL="nonsense",
    )
    assert "LIGER_KERNEL_IMPL=nonsense makes it load more than these kernels need: unset it" in printed


def test_the_library_keeps_its_search_for_others():
    from liger_kernel.ops import fused_moe

    from veomni_liger import moe_experts
    from veomni_liger.pinned_experts import CONFIGURATIONS

    assert moe_experts._apply.__self__ is not fused_moe.LigerFusedMoEFunction
    assert min(len(getattr(fused_moe, name).configs) for name in CONFIGURATIONS) > 1


@given(tokens=st.integers(0, 1 << 20), vocabulary=st.integers(2, 300_000), element_size=st.sampled_from([2, 4]))
def test_a_chunk_s_logits_fit_the_budget_or_are_a_tile_s_and_no_fewer_chunks_would_do(tokens, vocabulary, element_size):
    found = chunks(tokens, vocabulary, element_size)
    assert [row for each in found for row in (each.start, each.stop)] == [
        row for start, stop in itertools.pairwise([0, *(each.stop for each in found)]) for row in (start, stop)
    ]
    assert (found[-1].stop if found else 0) == tokens
    rows = max((each.stop - each.start for each in found), default=0)
    most = max(LOGITS_BYTES // (vocabulary * element_size * 128), 1) * 128
    assert rows <= most and len(found) == -(-tokens // most)


def test_the_chunks_of_a_large_vocabulary():
    assert [each.stop - each.start for each in chunks(8192, 151936, 2)] == [1024] * 8
