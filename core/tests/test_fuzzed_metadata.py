"""No metadata of an installed distribution ends in an untyped error; nor does it keep other plugins from loading."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import TEXTS, bounded, typed_errors
from plugin_fixtures import HEALTHY
from veomni_core import discover
from veomni_tools.locks.locked import installed

MODULES = (
    st.sampled_from(["acme_fuzzed", "acme_fuzzed:plugin", "acme.fuzzed", ".acme", "os", "", "acme fuzzed [x]"]) | TEXTS
)
LINES = st.one_of(
    st.builds("{} = {}".format, TEXTS, MODULES),
    st.builds("acme = {}".format, MODULES),
    st.sampled_from(["[veomni.plugins]", "[veomni.plugins", "[console_scripts]", "acme", "= acme", "# acme"]),
    TEXTS,
)
ENTRY_POINTS = st.lists(LINES, max_size=4).map(lambda lines: "\n".join(["[veomni.plugins]", *lines]))
METADATA = st.lists(
    st.builds("{}: {}".format, st.sampled_from(["Name", "Version", "Metadata-Version"]), TEXTS)
    | st.sampled_from(["Name: acme", "Version: 1.0", "Name: veomni-core", ""])
    | TEXTS,
    max_size=4,
).map("\n".join)
RECORDS = st.lists(
    st.sampled_from(
        ["acme_fuzzed.py,,", "acme_fuzzed.py", "a,b,c,d", "a,,x", "a,sha256,1", "../x,,", "/,,", ",,", '"', "a\0b,,"]
    )
    | TEXTS,
    max_size=3,
).map("\n".join)
SOURCES = st.sampled_from(
    [
        HEALTHY.replace("{module}", "acme_fuzzed").replace("{kernel}", "acme").replace("\n    ", "\n"),
        *("VEOMNI_PLUGIN_API_VERSION = 1", "raise SystemExit(3)", "x = (", "VEOMNI_PLUGIN_API_VERSION = [1]", "1 / 0"),
        "from veomni_core import hookimpl\nVEOMNI_PLUGIN_API_VERSION = 1\n@hookimpl\n"
        "def veomni_kernels():\n    return 3",
    ]
)


def content(text: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    """``text`` as a file has it, or bytes that are no UTF-8."""
    return text.map(lambda each: each.encode("utf-8", "surrogatepass")) | st.binary(max_size=8)


@pytest.fixture
def only(tmp_path: Path) -> Iterator[Callable[[dict[str, bytes], str], None]]:
    """Makes a new folder with one distribution the only one on the path, beside Python's own library."""
    path = [each for each in sys.path if "site-packages" not in each and not (Path(each) / "veomni_core").is_dir()]
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:

        def installed_alone(info: dict[str, bytes], source: str) -> None:
            folder = tmp_path / str(next(numbers))
            (folder / "acme-1.0.dist-info").mkdir(parents=True)
            for name, written in info.items():
                (folder / "acme-1.0.dist-info" / name).write_bytes(written)
            (folder / "acme_fuzzed.py").write_text(source)
            core = folder / "veomni_core-0.1.0.dist-info"
            core.mkdir()
            (core / "METADATA").write_text("Name: veomni-core\nVersion: 0.1.0\n")
            sys.modules.pop("acme_fuzzed", None)
            patch.setattr(sys, "path", [str(folder), *path])
            importlib.invalidate_caches()

        yield installed_alone
    sys.modules.pop("acme_fuzzed", None)
    importlib.invalidate_caches()


@bounded(150)
@given(content(METADATA) | st.none(), content(ENTRY_POINTS), content(RECORDS) | st.none(), SOURCES)
def test_a_distribution_is_described_or_is_a_record_of_what_failed(
    only: Callable[[dict[str, bytes], str], None],
    metadata: bytes | None,
    entry_points: bytes,
    record: bytes | None,
    source: str,
) -> None:
    info = {"METADATA": metadata, "entry_points.txt": entry_points, "RECORD": record}
    only({name: written for name, written in info.items() if written is not None}, source)
    found = discover({})
    for plugin in found.plugins:
        assert plugin.status == "loaded" or plugin.problem
        assert str(plugin) and isinstance(plugin.version, str)
    assert found.plugin("veomni-core").status == "loaded"
    with typed_errors():
        discover({"VEOMNI_PLUGINS_STRICT": "1"})
    with typed_errors():
        installed()


@bounded(60)
@given(st.dictionaries(st.sampled_from(["VEOMNI_PLUGINS", "VEOMNI_PLUGINS_BLOCK", "VEOMNI_FROZEN"]), TEXTS, max_size=2))
def test_variables_are_followed_or_refused(
    only: Callable[[dict[str, bytes], str], None], variables: dict[str, str]
) -> None:
    only({"METADATA": b"Name: acme\nVersion: 1\n"}, "")
    with typed_errors():
        discover(variables)
