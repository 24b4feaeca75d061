"""What each command prints keeps to the terminal's width, and has every word that it prints where there is no limit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from models import build
from veomni_conformance.cli.verify_processes import Check, Checks
from veomni_conformance.cli.verify_tables import show_results
from veomni_core import bind, discover
from veomni_core.cli.app import build_app
from veomni_tools.cli.doctor import examine, show_examination
from veomni_transformers.cli.coverage import show_coverage
from veomni_transformers.coverage import cover, model_types

pytestmark = pytest.mark.thorough

WIDTHS = (60, 80, 120, 200)
JOB = """
model:
  config: {model_type: llama, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2,
           vocab_size: 64}
  ops_implementation: {preset: auto, rms_norm_implementation: {"*.layers.0.*": eager, default: torch}}
"""


def words(text: str) -> set[str]:
    return {*re.sub("[┏┓┗┛━┃┡┩╇┳│└┘┴─]", " ", text).split()}


def check(show: Callable[[], str], monkeypatch: pytest.MonkeyPatch, *required: str) -> None:
    """``show`` prints the same words at every width, among them ``required``, on lines that are no wider."""
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = words(show())
    assert {word for text in required for word in text.split()} <= whole
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        text = show()
        assert whole <= words(text)
        assert max(map(len, text.splitlines())) <= width


def run(*arguments: object) -> str:
    result = CliRunner().invoke(build_app(), [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list(monkeypatch):
    data = json.loads(run("list", "--json"))
    names = [kernel for plugin in data["plugins"] for kernel in (plugin["name"], plugin["status"])]
    variants = [text for op in data["ops"] for text in (op["op"], op["field"], *op["variants"])]
    check(lambda: run("list"), monkeypatch, *names, *variants)


def test_explain(monkeypatch):
    data = json.loads(run("explain", "moe_experts", "--json"))
    reasons = ["; ".join(kernel["reasons"]) for kernel in data["kernels"]]
    named = [text for kernel in data["kernels"] for text in (kernel["variant"], kernel["kernel"], kernel["plugin"])]
    check(lambda: run("explain", "moe_experts"), monkeypatch, *reasons, *named)


@pytest.mark.parametrize("hardware", [(), ("--hardware", "h200")])
def test_plan(monkeypatch, tmp_path, hardware):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    data = json.loads(run("plan", path, "--json", *hardware))
    sites = [site for op in data["ops"] for site in op["sites"]]
    fields = [op["config_field"] for op in data["ops"]]
    shown = [text for site in sites for text in (site["kernel"], site["reason"])]
    assumed = [text for line in data["assumptions"] for text in line.split(": ")[1:]]
    check(lambda: run("plan", path, "--all", *hardware), monkeypatch, *fields, *shown, *assumed)


def test_plan_of_what_is_divided(monkeypatch, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    parameters = json.loads(run("plan", path, "--parallel", "--json"))["tp"]
    check(lambda: run("plan", path, "--parallel"), monkeypatch, *parameters)


def test_a_receipt(monkeypatch):
    with bind(build("qwen3_moe"), {"preset": "auto"}) as binding:
        ops = [op for op in binding.receipt.to_dict()["ops"] if op["found"]]
        texts = [text for op in ops for text in (op["field"], *op["chosen"], *(site["reason"] for site in op["eager"]))]
        check(binding.receipt.table, monkeypatch, *texts)


@pytest.mark.thorough
def test_doctor(monkeypatch, capsys):
    found = examine(timeout=60)

    def show() -> str:
        show_examination(found)
        return capsys.readouterr().out

    check(show, monkeypatch, *(f"{report['name']} {report['status']}" for report in found["plugins"]))


@pytest.mark.thorough
def test_verify(monkeypatch, capsys):
    record = discover().plugin("veomni-torch")
    (spec,) = [spec for spec in record.kernels if str(spec) == "rms_norm/unweighted_rounded_scale:torch"]
    rows = Checks("cpu", 1).rows([Check(record.name, spec, "float32")])

    def show() -> str:
        show_results(rows, "veomni-torch on cpu")
        return capsys.readouterr().out

    check(show, monkeypatch, *(text for row in rows for text in (row.kernel, row.result, *row.detail)))


@pytest.mark.thorough
def test_coverage(monkeypatch, capsys):
    models = [*cover([types for types in model_types("causal") if types[1] in ("llama", "mixtral")], discover())]

    def show() -> str:
        show_coverage(models)
        return capsys.readouterr().out

    check(show, monkeypatch, *(op.op_name for model in models for op in model.ops))
