"""What fuzzing found: input that ended in an error of Python's or of a library, and now in one that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veomni_core import HardwareRequirement, KernelOption, KernelSpec, OpsConfig, discover
from veomni_core.commands import beside_job
from veomni_core.errors import (
    ConfigError,
    HostError,
    JobFileError,
    LockFileError,
    PluginLoadError,
    SpecError,
    UnknownNameError,
)
from veomni_core.jobs.jobfile import load_yaml, parse_yaml
from veomni_tools.locks.locked import installed
from veomni_transformers.jobs.model_config import load_model_config

MULTIPLYING = "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("? [a, b]\n: c", "line 1, column 3: ['a', 'b'] can't be a key; keys are text"),
        ("a: &a [*a]", "line 1, column 4: an alias leads back to the value that it is in"),
        (MULTIPLYING, "its aliases multiply to more than 1,000,000 values"),
        ("a: !!int x", "line 1, column 4: 'x' can't be read as int: ValueError"),
        ("a: !!bool x", "'x' can't be read as bool: KeyError"),
        ("a: 2024-13-45", "'2024-13-45' can't be read as timestamp: ValueError('month must be in 1..12')"),
        ("a: " + "9" * 5000, "can't be read as int"),
        ("a: 0x" + "f" * 5000, "this number has more than 64 bits"),
        ('a: "\\ud800"', "'\\ud800' holds half of a surrogate pair"),
        ("[" * 5000, "it is nested too deeply to be read"),
        ("!!map x", "expected a mapping node, but found scalar"),
    ],
)
def test_yaml_that_can_t_be_a_job_is_refused_where_it_stands(text: str, said: str) -> None:
    with pytest.raises(JobFileError) as caught:
        parse_yaml(text, "job.yaml")
    assert str(caught.value).startswith("job.yaml") and said in str(caught.value)


def test_anchors_and_merges_that_a_job_may_have_are_read() -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\nagain: [*base, *base]"
    assert parse_yaml(text)["other"] == {"a": 1, "b": 3} and parse_yaml(text)["again"] == [{"a": 1, "b": 2}] * 2


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="cannot be read as text"):
        load_yaml("a\0b.yaml")
    assert beside_job("a\0b*", tmp_path) == "a\0b*"


def test_a_home_that_nobody_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="~nobody-here, and there is no such variable of the environment or home"):
        beside_job("~nobody-here/x", tmp_path)
    with pytest.raises(LockFileError, match="~nobody-here/veomni.lock: there is no such lock file"):
        discover({"VEOMNI_FROZEN": "~nobody-here/veomni.lock"})


@pytest.mark.parametrize("model_type", [["llama"], {"llama": 1}, 3])
def test_a_model_type_that_is_no_text_is_refused(model_type: Any) -> None:
    with pytest.raises(ConfigError, match="model_type must be text, e.g. model_type: llama, got "):
        load_model_config({"model_type": model_type})


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000])
def test_a_model_s_config_that_json_can_t_hold_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(JobFileError, match="not a JSON model config"):
        load_model_config(tmp_path)


def test_keys_of_a_config_that_are_no_text_are_refused(install_absent: Callable[[str], str]) -> None:
    install_absent("far-plugin")
    with pytest.raises(UnknownNameError, match="op 0 is not registered"):
        OpsConfig.from_dict({"preset": "eager", "profile": {0: {}}})
    with pytest.raises(ConfigError, match="has no option 0"):
        OpsConfig.from_dict(
            {"preset": "eager", "cross_entropy_loss_implementation": {"kernel": "chunk_loss", "options": {0: 1}}}
        )
    config = OpsConfig.from_dict(
        {"preset": "eager", "far_op_implementation": {"kernel": "far", "options": {0: 1, "rows": 2, None: 3}}}
    )
    assert config.choices["far_op"].groups[0].requested[0].options == (("0", "1"), ("None", "3"), ("rows", "2"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KernelSpec("a", "b", "c", "d:e", settings=((),)), "settings must be a tuple of (name, value) pairs"),
        (lambda: KernelSpec("a", "b", "c", "d:e", settings=(("x", []),)), "settings must be a tuple of (name, value)"),
        (lambda: KernelSpec("a", "b", "c", "d:e", settings=None), "settings must be a tuple of (name, value) pairs"),
        (lambda: KernelSpec("a", "b", "c", "d:e", options=None), "options must be a tuple of KernelOption, not None"),
        (lambda: KernelOption("rows", 1, choices=3), "choices must be a tuple, not 3"),
        (lambda: KernelOption("rows", 1, minimum="a"), "minimum must be a number or None, not 'a'"),
        (lambda: KernelOption("rows", 1.0, choices=(10**400,)), "rows must be of type float"),
        (lambda: HardwareRequirement("cuda", others=None), "others must be a tuple of HardwareRequirement, not None"),
        (lambda: HardwareRequirement.from_dict(None), "expected a mapping of device_type, "),
        (lambda: HardwareRequirement.from_dict({"vendor": "x"}), "expected a mapping of device_type, "),
        (lambda: HardwareRequirement.from_dict({"others": 3}), "others must be a tuple of dict, not 3"),
    ],
)
def test_a_field_of_a_spec_of_another_type_is_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert said in str(caught.value)


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a distribution with these files in its dist-info on the path."""

    def put(**files: bytes) -> None:
        info = tmp_path / "acme-1.0.dist-info"
        info.mkdir()
        for name, content in files.items():
            (info / {"points": "entry_points.txt"}.get(name, name)).write_bytes(content)
        monkeypatch.syspath_prepend(str(tmp_path))

    return put


NAMED = b"Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n"
OURS = b"[veomni.plugins]\nacme = acme.plugin\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"METADATA": NAMED, "points": OURS + b"acme\n"}, "its entry_points.txt can't be read"),
        ({"METADATA": NAMED, "points": b"\xff\xfe"}, "its entry_points.txt can't be read"),
        (
            {"METADATA": b"", "points": OURS},
            "its METADATA has no Name and no Version; uninstall it, or install it again",
        ),
        ({"METADATA": b"Name: acme\n", "points": OURS}, "its METADATA has no Version; uninstall it, or"),
        ({"METADATA": b"Name: \xff\n", "points": OURS}, "its METADATA can't be read"),
    ],
)
def test_a_distribution_with_damaged_metadata_fails_alone(
    damaged: Callable[..., None], files: dict[str, bytes], said: str
) -> None:
    damaged(**files)
    registry = discover({})
    (record,) = registry.failed()
    assert said in record.problem
    assert registry.plugin("veomni-torch").healthy
    with pytest.raises(PluginLoadError, match="failed to load: its "):
        discover({"VEOMNI_PLUGINS_STRICT": "1"})
    with pytest.raises(HostError, match="can't be locked: its "):
        installed()


def test_broken_entry_points_of_others_are_nobody_s_plugin(damaged: Callable[..., None]) -> None:
    damaged(METADATA=NAMED, points=b"[console_scripts]\nacme\n")
    assert not discover({}).failed()


def test_a_damaged_list_of_files_can_t_be_locked(damaged: Callable[..., None]) -> None:
    damaged(METADATA=NAMED, points=OURS, RECORD=b"a,b,c,d\n")
    with pytest.raises(HostError, match=r"acme: the list of its files \(RECORD\) can't be read"):
        installed()
