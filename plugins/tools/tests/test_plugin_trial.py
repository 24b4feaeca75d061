"""Plugins that abort, hang or end the process that loads them are named, and the command goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from veomni_core import discover
from veomni_core.errors import ConfigError
from veomni_tools import plugin_trial

AT_IMPORT = {
    "prints": "import os; print('hello'); os.write(1, b'as a library in C does')",
    "starts": "import subprocess; subprocess.Popen(['sleep', '25'])",
    "aborts": "import os; os.abort()",
    "exits": "import os; os._exit(3)",
    "hangs": "import time; time.sleep(600)",
    "interrupts": "raise KeyboardInterrupt",
}
SAYS = {
    "aborts": "it ended the process that loaded it: SIGABRT",
    "exits": "it ended the process that loaded it: exit code 3",
    "hangs": "it did not load within 20 s (VEOMNI_PLUGIN_TIMEOUT)",
    "interrupts": "KeyboardInterrupt",
}


@pytest.mark.thorough
def test_plugins_that_end_or_hold_the_process_are_named_and_others_live(
    install: Callable[..., str], veomni: Callable[..., str], tmp_path: Path
) -> None:
    for name, statement in AT_IMPORT.items():
        install(f"acme-{name}", f"{statement}\nVEOMNI_PLUGIN_API_VERSION = 1\n")
    found = json.loads(veomni("list", "--json", VEOMNI_PLUGIN_TIMEOUT="20"))
    problems = {each["name"]: each["problem"] for each in found["plugins"] if each["status"] == "failed"}
    assert problems == {f"acme-{name}": problem for name, problem in SAYS.items()}
    job = tmp_path / "job.yaml"
    sizes = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 4, vocab_size: 64"
    job.write_text(f"model: {{config: {{model_type: llama, {sizes}}}, ops_implementation: {{preset: auto}}}}\n")
    blocked = "acme-hangs"  # seen above; here it would cost the time again
    planned = json.loads(veomni("plan", job, "--json", VEOMNI_PLUGINS_BLOCK=blocked))
    assert [each["spec"]["name"] for each in planned["kernels"]]
    assert any(each.startswith("acme-aborts 1.0: it ended the process") for each in planned["failed_rules"])


@pytest.mark.thorough
def test_what_plugins_print_when_they_are_called_is_no_part_of_json(
    install: Callable[..., str], veomni: Callable[..., str], tmp_path: Path
) -> None:
    install(
        "acme-loud",
        """
        from veomni_core import DeviceSpec, KernelSpec, hookimpl
        from veomni_ops.rms_norm import standard

        VEOMNI_PLUGIN_API_VERSION = 1

        def detect():
            print("looking")

        @hookimpl
        def veomni_devices():
            return [DeviceSpec("acme", detect="{module}:detect")]

        def can_run(site):
            print("judging")
            return ""

        @hookimpl
        def veomni_kernels():
            return [KernelSpec("loud", "rms_norm", "standard", "{module}:standard", can_run="{module}:can_run")]
        """,
    )
    assert json.loads(veomni("explain", "rms_norm", "--json"))["op"]
    job = tmp_path / "job.yaml"
    sizes = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 4, vocab_size: 64"
    ops = "{preset: eager, rms_norm_implementation: loud}"
    job.write_text(f"model: {{config: {{model_type: llama, {sizes}}}, ops_implementation: {ops}}}\n")
    planned = json.loads(veomni("plan", job, "--json"))
    assert [each["spec"]["name"] for each in planned["kernels"]] == ["loud"]


def test_a_trial_of_no_number_of_seconds_is_an_error(install: Callable[..., str]) -> None:
    install("acme-quiet", "VEOMNI_PLUGIN_API_VERSION = 1\n")
    with pytest.raises(ConfigError, match="VEOMNI_PLUGIN_TIMEOUT='soon' is no number of seconds"):
        discover({"VEOMNI_PLUGIN_TIMEOUT": "soon"})
    assert discover({"VEOMNI_PLUGIN_TIMEOUT": "0"}).plugin("acme-quiet").status == "loaded"


def test_what_a_plugin_says_before_it_ends_may_be_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_latin.py").write_text(r"import os; os.write(2, b'caf\xe9'); os._exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugin_trial._try("acme_latin", 60) == "it ended the process that loaded it: exit code 3: caf\ufffd"
