"""docs/reference/faults.md: the planted faults, and the test that catches each, from what the runs found."""

from __future__ import annotations

from collections import Counter
from typing import Any

from faults.listed import Fault, faults
from faults.results import Results, read
from faults.suite_runs import CAUGHT, COLLECTION, HUNG, NOT_CAUGHT

_SUITES = {"test": "make test", "all": "make test-all"}
_ABOVE = """\
# Faults that the tests catch

Each line is a mistake that somebody could make in the sources, and the test that catches it. The mistake is made in a
copy of the repository, and the tests run there up to the first that fails: the files that most likely catch it, then
the whole suite. The test that failed counts if it passes without the mistake.

{summary}

<!-- not run: it takes hours; in the folder scripts, with the Python of .venv -->
```console
$ python -m faults --suite test               # all of them, one after the other
$ python -m faults --suite test --only NAME   # one
$ python -m faults --suite all                # what `make test` doesn't catch, by `make test-all`
```

The mistakes are in `scripts/faults/areas`, each with the text that it replaces. A test checks that each still fits.
"""


def page() -> str:
    """The page's text."""
    results, listed = read(), faults()
    parts = [_ABOVE.format(summary=_summary(listed, results))]
    for area in dict.fromkeys(fault.area for fault in listed):
        rows = [_row(fault, results.get(fault.name, {})) for fault in listed if fault.area == area]
        parts.append(f"## {area.replace('_', ' ').capitalize()}\n\n")
        parts[-1] += "".join(rows)
    return "\n".join(parts)


def _summary(listed: list[Fault], results: Results) -> str:
    found = [_best(results.get(fault.name, {})) for fault in listed]
    by_suite = Counter(suite for suite, result in found if result.get("result") == CAUGHT)
    others = Counter(str(result["result"]) for _, result in found if result and result["result"] != CAUGHT)
    said = [f"{count} are caught by `{_SUITES[suite]}`" for suite, count in by_suite.items()]
    said += [f"{count} are {result}" for result, count in sorted(others.items())]
    if missing := sum(not result for _, result in found):
        said.append(f"{missing} have not been run yet")
    commits = sorted({str(result["commit"]) for _, result in found if result})
    at = f" They were run at {' and '.join(commits)}." if commits else ""
    return f"Of {len(listed)} mistakes, {', '.join(said)}.{at}"


def _best(of_suites: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The suite that catches it, with its result; or else the largest that was run."""
    for suite in _SUITES:
        if of_suites.get(suite, {}).get("result") == CAUGHT:
            return suite, of_suites[suite]
    ran = [suite for suite in _SUITES if suite in of_suites]
    return (ran[-1], of_suites[ran[-1]]) if ran else ("", {})


def _row(fault: Fault, of_suites: dict[str, dict[str, Any]]) -> str:
    """Its name, linked to the file it is made in, its harm, and the test that catches it."""
    return f"- [`{fault.name}`](../../{fault.file}): {fault.harm} {_verdict(*_best(of_suites))}\n"


def _verdict(suite: str, result: dict[str, Any]) -> str:
    if not result:
        return "not run yet"
    if result["result"] == CAUGHT:
        test = _test(str(result.get("test", "it does not end")))
        return test if suite == "test" else f"`{_SUITES[suite]}`: {test}"
    words = {
        NOT_CAUGHT: f"nothing in {result.get('asked', 'what was run')} (`{_SUITES[suite]}`)",
        COLLECTION: f"no test: {_test(str(result.get('test', '')))} can't be collected",
        HUNG: "no test: the run doesn't end",
    }
    return words.get(str(result["result"]), "not run: see `results.json`")


def _test(node: str) -> str:
    """A test's file and name, without its parameters."""
    return f"`{node.partition('[')[0]}`" if node else "a test"
