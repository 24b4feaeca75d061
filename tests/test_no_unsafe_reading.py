"""No source file of a distribution reads data in a way that could run what it holds; the exceptions are named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
UNSAFE = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "dill.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "numpy.load", "np.load", "joblib.load"),
    *("eval", "exec", "os.system", "os.popen"),
}
# Each is said on docs/explanation/security.md, or reads what this process or its parent wrote.
KNOWN = {
    ("core/src/veomni_core/jobs/jobfile.py", "yaml.load"),  # with a subclass of SafeLoader
    (
        "plugins/conformance/src/veomni_conformance/rank_process.py",
        "pickle.loads",
    ),  # a task that the parent process wrote
    ("plugins/trainer/src/veomni_trainer/output/shards.py", "pickle.Unpickler"),  # lets nothing in but an index
}


def unsafe(source: str) -> Iterator[str]:
    """The names of the calls and base classes in ``source`` that are unsafe with data of others."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE:
            safe = any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords)
            if not (safe and ast.unparse(node.func) == "torch.load"):
                yield ast.unparse(node.func)
        elif isinstance(node, ast.ClassDef):
            yield from (base for base in map(ast.unparse, node.bases) if base in UNSAFE)


def test_no_source_reads_what_could_run() -> None:
    found = {(str(file.relative_to(ROOT)), name) for file in SOURCES for name in unsafe(file.read_text("utf-8"))}
    assert found == KNOWN


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.load(file)", ["torch.load"]),
        ("torch.load(file, weights_only=False)", ["torch.load"]),
        ("torch.load(file, weights_only=True)", []),
        ("import yaml\nyaml.load(text, Loader=yaml.Loader)", ["yaml.load"]),
        ("model.eval()", []),
        ("eval(text)", ["eval"]),
    ],
)
def test_what_is_unsafe_is_seen(source: str, found: list[str]) -> None:
    assert [*unsafe(source)] == found
