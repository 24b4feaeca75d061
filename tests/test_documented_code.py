"""Every code block of the documentation is run, by this test or by the one that its mark names, or says why not."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from documented_code import ROOT, blocks, pages, plugins
from page_run import PageRun
from veomni_conformance.cli import verify_processes

WITH_CODE = [page for page in pages() if any(True for _ in blocks(page))]
RUN_HERE = [page for page in WITH_CODE if any(block.is_run for block in blocks(page))]

# `make test` runs these; the others have their place in `make test-docs`.
ONE_OF_EACH_KIND = {
    "README.md",
    "docs/explanation/how-a-proof-works.md",
    "docs/how-to/per-module.md",
    "plugins/liger/README.md",
}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Runs a page as in a fresh process: what it imports, sets and installs is gone afterwards."""
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path.endswith("/src")))
    monkeypatch.setattr(sys, "path", [*sys.path])
    # The server whose forks are checks is that of these tests, which has imported more.
    monkeypatch.setattr(verify_processes.CONTEXT, "set_forkserver_preload", lambda names: None)

    def run(page: Path) -> None:
        if named := plugins(page):
            monkeypatch.setenv("VEOMNI_PLUGINS", named)
        before = {*sys.modules}
        try:
            with torch.random.fork_rng(devices=[]):
                PageRun(folder).run(page)
        finally:
            for name in {*sys.modules} - before:
                module = sys.modules[name]
                places = (
                    getattr(module, "__file__", None),
                    *getattr(module, "__path__", ()),
                )  # a namespace has no file
                if any(str(place).startswith(str(folder)) for place in places):
                    del sys.modules[name]
            importlib.invalidate_caches()

    return run


def _marked(page: Path) -> Any:
    return pytest.param(page, marks=[] if _name(page) in ONE_OF_EACH_KIND else [pytest.mark.docs])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pages' output is that of a machine without a GPU")
@pytest.mark.parametrize("page", [_marked(page) for page in RUN_HERE], ids=_name)
def test_the_code_of_a_page_runs(page: Path, read: Callable[[Path], None]) -> None:
    read(page)


@pytest.mark.docs
@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_a_test_that_a_page_names_runs_that_page(page: Path) -> None:
    for block in blocks(page):
        if named := block.value("run by "):
            test = ROOT / named
            assert test.is_file(), f"{block}: there is no {named}"
            what = page.parent.name if page.name == "README.md" and page.parent != ROOT else page.name
            assert what in test.read_text(encoding="utf-8"), f"{block}: {named} doesn't name {what}"


def _written(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


@pytest.mark.parametrize(
    "text, said",
    [
        ("```python\n1 / 0\n```\n", "page.md:1: division by zero"),
        ("```python\nprint(1 + 1)\n```\n\n<!-- output -->\n```text\n3\n```\n", r"page.md:6: Expected:\s+3\s+Got:\s+2"),
        ("```python\n>>> 1 + 1\n3\n```\n", r"Expected:\s+3\s+Got:\s+2"),
        ("```text\na line\n```\n", "a block of 'text' is not run: say why not"),
        ("```console\n$ make demo\n```\n", "`make demo` is no command that a test runs: say why not"),
        ("```console\n$ veomni --version\nveomni-core 99\n```\n", r"Expected:\s+veomni-core 99"),
        (
            "```console\n$ veomni plan missing.yaml\n```\n",
            r"ends with 2, not 0:\s+error: missing.yaml: there is no such",
        ),
        ("<!-- exits with 1 -->\n```console\n$ veomni --version\n```\n", "ends with 0, not 1"),
        ("```console\n$ pip install veomni-tortch\n```\n", "there is no distribution veomni-tortch"),
        ("```console\n$ pip install 'veomni-trainer[lore]'\n```\n", r"veomni-trainer has no extra \['lore'\]"),
        ("```yaml\ntrain: {stepps: 3}\n```\n", "Did you mean 'steps'"),
        ("```yaml\nmodel: {ops_implementation: {rms_norm_implementation: trch}}\n```\n", "Did you mean 'torch'"),
        ("```json\n{'a': 1}\n```\n", "Expecting property name"),
    ],
)
def test_a_block_that_is_wrong_is_seen(
    text: str, said: str, tmp_path: Path, read: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VEOMNI_PLUGINS", "veomni-torch")
    with pytest.raises(AssertionError, match=said):
        read(_written(tmp_path, text))


def test_a_mark_of_a_page_holds_for_blocks_without_one(tmp_path: Path) -> None:
    text = "<!-- all run by tests/a.py -->\n```\na\n```\n<!-- not run: why -->\n```\nb\n```\n```{toctree}\nc\n```\n"
    marks = [(block.mark, block.is_run) for block in blocks(_written(tmp_path, text))]
    assert marks == [("run by tests/a.py", False), ("not run: why", False), ("run by tests/a.py", False)]


def test_a_page_is_run_in_order_in_a_folder_of_its_own(tmp_path: Path, read: Callable[[Path], None]) -> None:
    page = """
<!-- not run: it fails -->
```python
1 / 0
```

1. A list:

   ```python
   # greetings/greeting.py
   GREETING = "hello"
   ```

```python
import sys

sys.path[:0] = [""]
from greetings.greeting import GREETING
```

```python
>>> GREETING
'hel...'
```

```console
$ python greetings/greeting.py
$ python -c "from greetings.greeting import GREETING; print(GREETING)"  # prints it
hello
```
"""
    read(_written(tmp_path, page))
    assert not {"greetings", "greetings.greeting"} & sys.modules.keys()
