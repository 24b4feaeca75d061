"""Discovery: policy before import, one bad plugin harms no other, nothing depends on order."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

import pytest

from veomni_core.descriptions.hardware import Hardware
from veomni_core.discovery.discover import discover
from veomni_core.errors import ConfigError, KernelUnavailableError, PluginLoadError, UnknownNameError
from veomni_core.planning.config import OpsConfig
from veomni_core.planning.planner import plan_sites
from veomni_core.sites.site import Site

API = "from veomni_core import HardwareRequirement, KernelSpec, OpSpec, hookimpl\nVEOMNI_PLUGIN_API_VERSION = 1\n"
SPEC = 'KernelSpec(name="bad", op_name="rms_norm", variant="standard", factory="m:f")'

BAD_PLUGINS = {
    "import error": ("import a_library_that_is_not_here", "ModuleNotFoundError: No module named 'a_library_that"),
    "exits while imported": ("raise SystemExit(3)", "SystemExit: 3"),
    "exception in a hook": (API + "@hookimpl\ndef veomni_kernels():\n    raise OSError('no disk')", "OSError: no disk"),
    "hook without a mark": (
        API + "def veomni_kernels():\n    return []",
        "veomni_kernels is not marked with @hookimpl",
    ),
    "misspelt hook": (API + "@hookimpl\ndef veomni_kernel():\n    return []", "unknown hook 'veomni_kernel'"),
    "hook with parameters": (API + "@hookimpl\ndef veomni_kernels(ops):\n    return []", "Argument(s) {'ops'}"),
    "no API version": ("x = 1", "declares no VEOMNI_PLUGIN_API_VERSION; this core supports versions 1 to 2"),
    "wrong API version": (
        "VEOMNI_PLUGIN_API_VERSION = 3",
        "has plugin API version 3; this core supports versions 1 to 2",
    ),
    "newer API versions": (
        "VEOMNI_PLUGIN_API_VERSION = (3, 4)",
        "has plugin API versions 3 to 4; this core supports versions 1 to 2",
    ),
    "API versions in the wrong order": (
        "VEOMNI_PLUGIN_API_VERSION = (2, 1)",
        "VEOMNI_PLUGIN_API_VERSION must be a version, or (oldest, newest), not (2, 1)",
    ),
    "API version of another type": (
        "VEOMNI_PLUGIN_API_VERSION = '1'",
        "must be a version, or (oldest, newest), not '1'",
    ),
    "duplicate kernel": (
        API + f"@hookimpl\ndef veomni_kernels():\n    return [{SPEC}, {SPEC}]",
        "kernel rms_norm/standard:bad is described twice",
    ),
    "spec of the wrong type": (
        API + "@hookimpl\ndef veomni_kernels():\n    return [{'name': 'bad'}]",
        "veomni_kernels() item 0 must be a KernelSpec, not dict",
    ),
    "not a list": (
        API + f"@hookimpl\ndef veomni_kernels():\n    return {SPEC}",
        "veomni_kernels() must return a list of KernelSpec, not KernelSpec",
    ),
    "bad factory": (
        API + "@hookimpl\ndef veomni_kernels():\n    return [KernelSpec('bad', 'rms_norm', 'standard', 'nowhere')]",
        "factory must read \"module:attribute\", not 'nowhere'",
    ),
    "bad requirement": (
        API + "@hookimpl\ndef veomni_kernels():\n    return [HardwareRequirement(packages=('>>',))]",
        "'>>' is not a package requirement",
    ),
    "redefines a core op": (
        API + "@hookimpl\ndef veomni_ops():\n"
        "    return [OpSpec(name='rms_norm', variants=('a',), config_field='my_field', contract='m:C')]",
        "op 'rms_norm' is defined by",
    ),
    "takes a core field": (
        API + "@hookimpl\ndef veomni_ops():\n"
        "    return [OpSpec(name='mine', variants=('a',), config_field='rms_norm_implementation', contract='m:C')]",
        "config field 'rms_norm_implementation' is defined by",
    ),
}


@pytest.mark.parametrize("source, problem", BAD_PLUGINS.values(), ids=BAD_PLUGINS)
def test_a_bad_plugin_is_recorded_and_harms_no_other(install, install_healthy, source, problem):
    install_healthy("good-plugin", "good")
    install("bad-plugin", source, version="2.3")

    found = discover({})

    record = found.plugin("bad-plugin")
    assert record.status == "failed"
    assert problem in record.problem
    assert (record.distribution, record.version) == ("bad-plugin", "2.3")
    assert found.find("rms_norm", "standard", "good") is not None
    assert found.find("rms_norm", "standard", "bad") is None


@pytest.mark.parametrize("source", [s for s, _ in BAD_PLUGINS.values()], ids=BAD_PLUGINS)
def test_strict_raises_at_once(install, source):
    install("bad-plugin", source)
    with pytest.raises(PluginLoadError, match="plugin bad-plugin of bad-plugin 1.0 failed to load"):
        discover({"VEOMNI_PLUGINS_STRICT": "1"})


def test_the_traceback_is_kept(install):
    install("bad-plugin", "def helper():\n    1 / 0\nhelper()")
    record = discover({}).plugin("bad-plugin")
    assert "in helper" in record.traceback and "ZeroDivisionError" in record.traceback


def test_naming_a_kernel_of_a_failed_plugin_gives_its_reason(install):
    install(
        "bad-plugin",
        API + "@hookimpl\ndef veomni_ops():\n"
        "    return [OpSpec(name='rms_norm', variants=('a',), config_field='f', contract='m:C')]\n"
        "@hookimpl\ndef veomni_kernels():\n    return [KernelSpec('mine', 'rms_norm', 'standard', 'm:f')]",
    )
    config = OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": "mine"})
    sites = (Site("rms_norm", "norm", "norm modules", "standard", ""),)
    with pytest.raises(KernelUnavailableError, match=r"mine is provided by bad-plugin 1.0, which failed: op 'rms"):
        plan_sites(sites, config, hardware=Hardware.named("cpu"))


def test_naming_an_unknown_kernel_mentions_plugins_that_failed_before_they_could_say_what_they_have(install):
    install("bad-plugin", "import a_library_that_is_not_here")
    with pytest.raises(UnknownNameError, match="may belong to bad-plugin 1.0, which failed to load: ModuleNotFound"):
        OpsConfig.from_dict({"rms_norm_implementation": "from_the_broken_one"})


def test_two_distributions_with_one_plugin_name_are_both_refused_before_import(install, install_healthy):
    install_healthy("good-plugin", "good")
    install("twin-a", "raise AssertionError('imported')", plugin="twin")
    install("twin-b", "raise AssertionError('imported')", plugin="twin")
    twins = [record for record in discover({}).plugins if record.name == "twin"]
    assert [record.status for record in twins] == ["failed", "failed"]
    assert twins[0].problem == "plugin name 'twin' is registered by twin-a 1.0 and twin-b 1.0; uninstall all but one"
    assert discover({}).find("rms_norm", "standard", "good")


def test_a_kernel_that_two_plugins_claim_goes_to_neither_and_says_so(install_healthy):
    install_healthy("plugin-a", "contested")
    install_healthy("plugin-b", "contested")
    found = discover({})
    assert [found.plugin(name).status for name in ("plugin-a", "plugin-b")] == ["loaded", "loaded"]
    with pytest.raises(KernelUnavailableError, match="claimed by plugin-a 1.0 and plugin-b 1.0.*VEOMNI_PLUGINS_BLOCK"):
        found.resolve("rms_norm", "standard", "contested")
    assert discover({"VEOMNI_PLUGINS_BLOCK": "plugin-b"}).resolve("rms_norm", "standard", "contested")


@pytest.mark.parametrize(
    "environ, reason",
    [
        ({"VEOMNI_PLUGINS_BLOCK": "loud-plugin"}, "VEOMNI_PLUGINS_BLOCK names it"),
        ({"VEOMNI_PLUGINS": "good-plugin"}, "VEOMNI_PLUGINS doesn't name it"),
        ({"VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1"}, "VEOMNI_DISABLE_PLUGIN_AUTOLOAD is set"),
        ({"VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "yes", "VEOMNI_PLUGINS": "good-plugin"}, "AUTOLOAD is set"),
    ],
)
def test_policy_is_decided_before_the_plugin_is_imported(install, install_healthy, environ, reason):
    install_healthy("good-plugin", "good")
    module = install("loud-plugin", "VEOMNI_PLUGIN_API_VERSION = 1")
    record = discover(environ).plugin("loud-plugin")
    assert record.status == "blocked" and reason in record.problem
    assert module not in sys.modules


def test_naming_a_kernel_of_a_blocked_plugin_says_what_blocks_it():
    registry = discover({"VEOMNI_PLUGINS": "veomni-torch"})
    assert registry.absence("rms_norm", "liger_kernel").endswith("which is blocked: VEOMNI_PLUGINS doesn't name it")


def test_a_plugin_for_several_api_versions_loads_without_the_hooks_that_are_not_here(install):
    kernels = f"@hookimpl\ndef veomni_kernels():\n    return [{SPEC}]\n"
    newer = "@hookimpl(optionalhook=True)\ndef veomni_schedules():\n    return []\n"
    install("both-plugin", API.replace("= 1", "= (1, 2)") + kernels + newer)
    record = discover({}).plugin("both-plugin")
    assert record.healthy, record.problem
    assert [spec.name for spec in record.kernels] == ["bad"]


def test_false_is_false(install_healthy):
    install_healthy("good-plugin", "good")
    assert discover({"VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "0"}).plugin("good-plugin").healthy


@pytest.mark.parametrize("variable", ["VEOMNI_PLUGINS", "VEOMNI_PLUGINS_BLOCK"])
def test_naming_a_plugin_that_is_not_installed_is_an_error(install_healthy, variable):
    install_healthy("good-plugin", "good")
    with pytest.raises(
        UnknownNameError, match=f"{variable}: no plugin 'god-plugin' is installed. Did you mean 'good-p"
    ):
        discover({variable: "god-plugin"})


@pytest.mark.parametrize("variable", ["VEOMNI_PLUGINS_STRICT", "VEOMNI_DISABLE_PLUGIN_AUTOLOAD"])
def test_a_switch_takes_only_booleans(variable):
    with pytest.raises(ConfigError, match=f"{variable}='maybe' is not a boolean"):
        discover({variable: "maybe"})


def test_a_plugin_that_is_allowed_and_blocked_is_an_error(install_healthy):
    install_healthy("good-plugin", "good")
    with pytest.raises(ConfigError, match="good-plugin: named in VEOMNI_PLUGINS and in VEOMNI_PLUGINS_BLOCK"):
        discover({"VEOMNI_PLUGINS": "good-plugin", "VEOMNI_PLUGINS_BLOCK": "good-plugin"})


def test_a_plugin_that_seeds_while_imported_leaves_the_process_its_random_numbers(install, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # other threads' draws would be made again
    install("seeding-plugin", f"import random\nrandom.seed(0)\n{API}")
    before = random.getstate()
    assert "seeding-plugin" in [record.name for record in discover({}).plugins]
    assert random.getstate() == before


def test_the_order_does_not_depend_on_installation_or_hash_seed(install_healthy, tmp_path):
    for name in ("plugin-c", "plugin-a", "plugin-b"):
        install_healthy(name, f"kernel_of_{name[-1]}")
    script = (
        "from veomni_core import discover; r = discover({}); "
        "print([p.name for p in r.plugins], [str(k) for k in r.kernels('rms_norm')], list(r.ops))"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "site-packages"), os.environ.get("PYTHONPATH", "")]))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
    names = outputs.pop()
    assert names.index("plugin-a") < names.index("plugin-b") < names.index("plugin-c")
