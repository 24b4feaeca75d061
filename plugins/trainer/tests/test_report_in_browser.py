"""The report in a browser, on a phone and on a desk, in light and in dark: nothing overflows, all can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from in_browser import chromium, inaccessible, opened, overflowing, views
from veomni_core import Hardware, Plan
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import append_metrics, figures, read_metrics
from veomni_trainer.report.runs import Run, write_comparison
from veomni_trainer.report.write import RunEnding, write_report

pytestmark = pytest.mark.docs

LONG = "an_unbroken_name_of_a_module_that_is_longer_than_a_phone_is_wide." * 4
RECEIPT = {
    "hardware": "cuda 90 (NVIDIA H200)",
    "plan_sha256": "ab" * 32,
    "transformations": [{"name": "binding", "description": "plan abababababab"}],
    "kernels": [
        {"kernel": f"rms_norm/{LONG}:torch", "factory": LONG, "distribution": "veomni-torch", "version": "0.1.0"}
    ],
    "ops": [
        {
            "field": f"{name}_implementation",
            "op": name,
            "asked": {"default": "torch", LONG: "eager"},
            "written": True,
            "chosen": ["torch", "quack", "liger_kernel"],
            "bound": 4,
            "found": 5,
            "eager": [{"path": LONG, "reason": f"the kernel can't run here, since {LONG} is not what it takes"}],
        }
        for name in ("rms_norm", "cross_entropy_loss", "load_balancing_loss")
    ],
}
# The contrast of every text with what is behind it, and of the charts' lines with their card.
CONTRASTS = """
() => {
  const parse = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const behind = each => {
    for (let at = each; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter(
    each => [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()));
  const low = texts.filter(each => ratio(parse(getComputedStyle(
    each)[each.namespaceURI.endsWith("svg") ? "fill" : "color"]), behind(each)) < 4.5);
  const card = behind(document.querySelector("figure"));
  const probe = document.body.appendChild(document.createElement("i"));
  const lines = ["mine", "eager", "validation", "run3", "run4", "run5", "run6", "run7", "run8"].filter(name => {
    probe.style.color = `var(--${name})`;
    return ratio(parse(getComputedStyle(probe).color), card) < 3;
  });
  return [...low.map(each => each.outerHTML.slice(0, 80)), ...lines];
}
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The report of a compared, interrupted run with long names, and the page of eight runs."""
    folder = RunFolder(tmp_path_factory.mktemp("report") / ("run-" + "x" * 80))
    for run in (folder, folder.compared("eager")):
        run.path.mkdir()
        for step in range(1, 301):
            row = {"step": step, "loss": 3 / step, "aux_loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3}
            measured = {"step_seconds": 0.1, "tokens_per_second": 12345678.9, "peak_memory_bytes": 10**11}
            append_metrics(run.metrics, row | measured)
        append_metrics(run.metrics, {"step": 300, "validation_loss": 1.0})
    append_metrics(folder.expert_rows, {"step": 1, "rows": [[1, 2], [3, 4]]})
    folder.receipt.write_text(json.dumps(RECEIPT), encoding="utf-8")
    job = {"model": {"dtype": "float32"}, "data": {"files": LONG}, "train": {"steps": 400}}
    folder.job.write_text(json.dumps(job), encoding="utf-8")
    write_report(folder, RunEnding("interrupted"))
    rows, plan = read_metrics(folder.metrics), Plan(Hardware("cpu"), (), ())
    colours = ("mine", "eager", *(f"run{number}" for number in range(3, 9)))
    runs = [Run(f"{LONG}{c}", c, rows, figures(rows), {"data": {"files": LONG + c}}, plan) for c in colours]
    write_comparison(runs, folder.path / "comparison.html")
    return [folder.report, folder.path / "comparison.html"]


def test_nothing_overflows_and_everything_can_be_read(pages: list[Path], tmp_path: Path) -> None:
    with chromium() as browser:
        for path in pages:
            with opened(browser, path) as page:
                for view in views(page, tmp_path / path.stem):
                    assert overflowing(page) == [], view
                    assert page.evaluate(CONTRASTS) == [], view
                    assert inaccessible(page) == [], view
