"""No text of a lock file ends in an untyped error, whether its hash is right or not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import TEXTS, VALUES, bounded, typed_errors
from veomni_tools.locks.lock_file import FORMAT, Lock, parse_lock, read_lock
from veomni_tools.locks.locked import refuse_changed_files

ABOUT = Lock({}).to_text().splitlines()[0]
HASHES = st.text("0123456789abcdef", min_size=16, max_size=64) | VALUES
NAMED = st.dictionaries(TEXTS, HASHES, max_size=2) | VALUES
PLUGINS = st.dictionaries(
    st.sampled_from(["acme", "veomni-torch"]),
    st.fixed_dictionaries({"module": TEXTS | VALUES, "specs": NAMED, "specs_sha256": HASHES}),
    max_size=2,
)
DISTRIBUTIONS = st.dictionaries(
    st.sampled_from(["veomni-core", "veomni-torch", "acme"]),
    st.fixed_dictionaries(
        {}, optional={"version": TEXTS | VALUES, "files": NAMED, "sha256": HASHES, "plugins": PLUGINS | VALUES}
    )
    | VALUES,
    max_size=2,
)
PLANS = st.fixed_dictionaries({"sha256": HASHES, "conditions": TEXTS, "sites": NAMED, "kernels": NAMED}) | VALUES
JOBS = st.dictionaries(TEXTS, st.dictionaries(TEXTS, PLANS, max_size=1) | VALUES, max_size=1)
LOCKS = st.fixed_dictionaries(
    {}, optional={"distributions": DISTRIBUTIONS | VALUES, "jobs": JOBS | VALUES, "x": VALUES}
)


def locked(body: str) -> str:
    """A lock file of this content, with the hash that belongs to it."""
    digest = hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{ABOUT}\n# format {FORMAT}, sha256 of what follows: {digest}\n{body}"


@bounded(150)
@given(LOCKS | VALUES)
def test_a_lock_with_a_right_hash_is_read_or_refused(data: Any) -> None:
    with typed_errors():
        lock = parse_lock(locked(yaml.safe_dump(data)), Path("veomni.lock"))
        assert parse_lock(lock.to_text(), Path("veomni.lock")) == lock


@bounded(80)
@given(
    TEXTS.map(locked)
    | st.text(max_size=20)
    | st.text("0123456789abcdef\n# ", max_size=9).map((ABOUT + "\n# format ").__add__)
)
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "veomni.lock"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with typed_errors():
        read_lock(file)


@bounded(4)
@given(LOCKS)
def test_what_is_installed_is_compared_or_refused(data: Any) -> None:
    with typed_errors():
        refuse_changed_files(parse_lock(locked(yaml.safe_dump(data)), Path("veomni.lock")))
