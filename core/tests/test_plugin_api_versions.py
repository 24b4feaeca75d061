"""A plugin that was written for a version of the plugin API loads in every core that supports it, and in no other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugin_fixtures import Installer
from veomni_core import OpsConfig, discover
from veomni_core.descriptions import hookspecs
from veomni_core.discovery.registry import PluginRecord
from veomni_core.errors import PluginLoadError, UnknownNameError

FIRST = Path(__file__).with_name("plugin_of_api_1")


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin of version 1 is installed: a folder with its ``dist-info``, as pip lays it out."""
    monkeypatch.syspath_prepend(str(FIRST))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_first"]:
        del sys.modules[name]


def supports(monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int) -> None:
    """Let the core support these versions, as a later one will."""
    monkeypatch.setattr(hookspecs, "PLUGIN_API_VERSIONS", range(oldest, newest + 1))


def described(record: PluginRecord) -> dict[str, list[str]]:
    """What the plugin brings, by kind."""
    return {
        "ops": [op.name for op in record.ops],
        "variants": [str(variant) for variant in record.variants],
        "kernels": [str(spec) for spec in record.kernels],
        "devices": [device.device_type for device in record.devices],
        "rules": [rule.name for rule in record.site_rules],
        "commands": [command.name for command in record.commands],
    }


@pytest.mark.parametrize("newest", [1, 2, 3])
def test_a_plugin_of_version_1_loads_with_all_that_it_describes(
    first: None, monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    supports(monkeypatch, 1, newest)
    registry = discover({})
    record = registry.plugin("acme-first")
    assert record.healthy, record.problem
    assert described(record) == {
        "ops": ["first_op"],
        "variants": ["rms_norm/first_norm"],
        "kernels": ["first_op/plain:first", "rms_norm/standard:first", "rms_norm/first_norm:first"],
        "devices": ["first"],
        "rules": ["first modules"],
        "commands": ["first"],
    }
    written = {"preset": "first", "first_op_implementation": {"kernel": "first", "options": {"rows": 8}}}
    assert OpsConfig.from_dict(written, registry).choices["rms_norm"].names == ("first",)


def test_a_core_that_gave_its_version_up_says_what_to_install(first: None, monkeypatch: pytest.MonkeyPatch) -> None:
    supports(monkeypatch, 2, 3)
    record = discover({"VEOMNI_PLUGINS": "acme-first"}).plugin("acme-first")
    assert record.problem == (
        "acme_first.plugin has plugin API version 1; this core supports versions 2 to 3. Install a newer version of "
        "the plugin, or an older veomni-core"
    )


def test_a_plugin_for_a_newer_version_is_refused_and_the_others_load(
    install: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install("newer-plugin", "VEOMNI_PLUGIN_API_VERSION = 3")
    said = f"{module} has plugin API version 3; this core supports versions 1 to 2. Upgrade veomni-core, or install an "
    said += "older version of the plugin"
    registry = discover({})
    assert registry.plugin("newer-plugin").problem == said
    assert registry.plugin("veomni-torch").healthy
    with pytest.raises(PluginLoadError, match="has plugin API version 3"):
        discover({"VEOMNI_PLUGINS_STRICT": "1"})
    with pytest.raises(UnknownNameError, match="It may belong to newer-plugin 1.0, which failed to load: "):
        OpsConfig.from_dict({"rms_norm_implementation": "newest"}, registry)
