"""The lock file's text: the same for the same content, and refused with one error when anything in it changed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from veomni_core.errors import LockFileError
from veomni_tools.locks.lock_file import (
    FORMAT,
    Lock,
    LockedDistribution,
    LockedPlan,
    LockedPlugin,
    parse_lock,
    read_lock,
)

PATH = Path("veomni.lock")
NAMES = st.text(min_size=1, max_size=12)
HASHES = st.text("0123456789abcdef", min_size=16, max_size=64)
PLUGINS = st.builds(LockedPlugin, NAMES, st.dictionaries(NAMES, HASHES, max_size=3), HASHES)
DISTRIBUTIONS = st.builds(
    LockedDistribution,
    NAMES,
    st.dictionaries(NAMES, HASHES, max_size=3),
    HASHES,
    st.dictionaries(NAMES, PLUGINS, max_size=2),
)
PLANS = st.builds(
    LockedPlan,
    HASHES,
    NAMES,
    st.dictionaries(NAMES, st.dictionaries(NAMES, NAMES, max_size=3), max_size=2),
    st.dictionaries(NAMES, NAMES, max_size=2),
)
LOCKS = st.builds(
    Lock,
    st.dictionaries(NAMES, DISTRIBUTIONS, max_size=3),
    st.dictionaries(NAMES, st.dictionaries(NAMES, PLANS, max_size=2), max_size=2),
)
ONE = Lock(
    {
        "veomni-acme": LockedDistribution(
            "1.0",
            {"acme/plugin.py": "0123456789abcdef"},
            "0" * 64,
            {"acme": LockedPlugin("acme.plugin", {"kernel rms_norm/standard:acme": "1" * 16}, "2" * 64)},
        )
    },
    {
        "job.yaml": {
            "cpu": LockedPlan("3" * 64, "no autocast, for training", {"rms_norm/standard": {"norm": "acme"}}, {})
        }
    },
)
TEXT = ONE.to_text()


@given(LOCKS)
def test_what_is_written_is_read(lock: Lock) -> None:
    assert parse_lock(lock.to_text(), PATH) == lock


@given(LOCKS)
def test_the_text_does_not_depend_on_the_order_in_which_it_was_put_together(lock: Lock) -> None:
    backwards = Lock(dict(reversed(lock.distributions.items())), dict(reversed(lock.jobs.items())))
    assert backwards.to_text() == lock.to_text()


@given(st.integers(0, len(TEXT)), st.integers(0, 20), st.text(max_size=5))
def test_any_edit_is_refused(start: int, length: int, put: str) -> None:
    edited = TEXT[:start] + put + TEXT[start + length :]
    if edited != TEXT:
        with pytest.raises(LockFileError, match=r"veomni\.lock"):
            parse_lock(edited, PATH)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["distributions", "jobs", "files", "plugins", "version", "sha256", "x"]), inner
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_content_of_another_kind_is_refused_even_under_its_own_hash(data: Any) -> None:
    text = under_its_hash(yaml.safe_dump(data))
    try:
        lock = parse_lock(text, PATH)
    except LockFileError:
        return
    assert parse_lock(lock.to_text(), PATH) == lock


def under_its_hash(body: str, written_format: int = FORMAT) -> str:
    about = TEXT.partition("\n")[0]
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f"{about}\n# format {written_format}, sha256 of what follows: {digest}\n{body}"


def test_another_format_names_both() -> None:
    with pytest.raises(LockFileError, match="has format 7, and this veomni-core reads format 1"):
        parse_lock(under_its_hash("x: 1\n", 7), PATH)


@pytest.mark.parametrize("body", ["a: 1\na: 2\n", "[", "{}", "distributions: {}\n", ""])
def test_a_body_that_is_no_lock_is_refused(body: str) -> None:
    with pytest.raises(LockFileError, match="is no lock file"):
        parse_lock(under_its_hash(body), PATH)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"job: 1\n", TEXT.encode()[:-1], TEXT.encode() * 2])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "veomni.lock").write_bytes(content)
    with pytest.raises(LockFileError, match=r"veomni\.lock"):
        read_lock(tmp_path / "veomni.lock")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LockFileError, match="there is no such lock file"):
        read_lock(tmp_path / "veomni.lock")
    with pytest.raises(LockFileError, match="can't be read"):
        read_lock(tmp_path)


def test_lines_that_end_as_on_windows_are_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "veomni.lock").write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert read_lock(tmp_path / "veomni.lock").distributions == ONE.distributions
