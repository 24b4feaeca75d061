"""A library whose code runs when it is first asked for a name, and not when others import it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from veomni_trainer.job.schema import Job
from veomni_trainer.setup import postponed
from veomni_trainer.setup.postponed import postpone, postpone_bitsandbytes

Plant = Callable[[str], None]
NAME = "acme_postponed"
PACKAGE = """
import sys
sys.acme_runs = getattr(sys, "acme_runs", 0) + 1
import acme_postponed.part as part
from . import part as same
VALUE = part.VALUE
"""


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """Writes the package with the code that it is given."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "acme_runs", 0, raising=False)
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "part.py").write_text("VALUE = 3\n", "utf-8")

    def write(code: str) -> None:
        (tmp_path / NAME / "__init__.py").write_text(code, "utf-8")
        importlib.invalidate_caches()

    yield write
    for name in [each for each in sys.modules if each.partition(".")[0] == NAME]:
        del sys.modules[name]


def runs() -> int:
    return int(vars(sys)["acme_runs"])


def test_imports_and_lists_of_modules_leave_it_alone_and_a_name_runs_it_once(plant: Plant) -> None:
    plant(PACKAGE)
    postpone(NAME)
    first, second = importlib.import_module(NAME), __import__(NAME)
    assert find_spec(NAME) is first.__spec__ and str(first.__file__).endswith("__init__.py")
    assert runs() == 0 and f"{NAME}.part" not in sys.modules
    assert first.VALUE == 3
    assert first is second is sys.modules[NAME] and type(first) is ModuleType
    assert (
        first.same is sys.modules[f"{NAME}.part"] and list(first.__path__) == first.__spec__.submodule_search_locations
    )
    with pytest.raises(AttributeError, match="module 'acme_postponed' has no attribute 'OTHER'"):
        _ = first.OTHER
    assert runs() == 1


def test_a_submodule_runs_the_package_first(plant: Plant) -> None:
    plant(PACKAGE)
    postpone(NAME)
    part = importlib.import_module(f"{NAME}.part")
    assert runs() == 1 and part is sys.modules[NAME].part


def test_what_was_imported_stays_and_what_is_not_installed_stays_missing(plant: Plant) -> None:
    plant(PACKAGE)
    before = importlib.import_module(NAME)
    postpone(NAME)
    assert sys.modules[NAME] is before and runs() == 1
    postpone("acme_missing")
    with pytest.raises(ModuleNotFoundError, match="acme_missing"):
        importlib.import_module("acme_missing")


def test_one_that_fails_says_so_where_it_is_used_and_leaves_no_module_behind(plant: Plant) -> None:
    plant("raise ImportError('no driver')")
    postpone(NAME)
    module = importlib.import_module(NAME)
    with pytest.raises(ImportError, match="no driver"):
        _ = module.VALUE
    assert NAME not in sys.modules
    with pytest.raises(ImportError, match="no driver"):
        importlib.import_module(NAME)


@pytest.mark.parametrize(
    ("lora", "names"), [(None, ["bitsandbytes"]), ({"rank": 2}, []), ({"quantization": "nf4"}, [])]
)
def test_a_job_with_an_adapter_imports_bitsandbytes_as_ever(
    lora: dict[str, object] | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(postponed, "postpone", asked.append)
    job = Job.model_construct(lora=lora)
    postpone_bitsandbytes(job)
    assert asked == names
