"""What the documentation shows is run: its jobs are planned, its file lists are true."""

from __future__ import annotations

import html
import json
import re
import textwrap
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headline_picture import MODELS, PICTURE, steps
from reference_pages import headline
from veomni_core.cli.app import build_app
from veomni_core.discovery.discover import discover

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(text: str, language: str) -> str:
    """The first fenced block of a language."""
    (first, *_) = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return first


def veomni(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_readme_s_job_can_be_planned(tmp_path):
    (tmp_path / "job.yaml").write_text(block(README, "yaml"))
    plan = json.loads(veomni("plan", str(tmp_path / "job.yaml"), "--json"))
    kernels = {op["op_name"]: {site["kernel"] for site in op["sites"]} for op in plan["ops"]}
    assert kernels["moe_experts"] == {"grouped_mm"}
    assert kernels["cross_entropy_loss"] == {"chunk_loss"}
    assert kernels["rms_norm"] == {"torch", "eager"}


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.yaml")), ids=lambda path: path.stem)
def test_every_example_job_can_be_planned(path):
    assert "sha256" in veomni("plan", str(path))


def test_the_ascend_page_writes_every_field_that_the_npu_plugin_serves():
    page = (ROOT / "docs" / "how-to" / "ascend.md").read_text(encoding="utf-8")
    registry = discover({"VEOMNI_PLUGINS": "veomni-npu"})
    written: dict[str, str] = {}
    for text in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        written |= yaml.safe_load(text)["model"]["ops_implementation"]
    kernels = {op.config_field: {spec.name for spec in registry.kernels(name)} for name, op in registry.ops.items()}
    del kernels["rotary_pos_emb_vision_implementation"]  # for towers that a language model has none of
    served = {field: names for field, names in kernels.items() if names}
    assert {field: {written.get(field)} for field in served} == served


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split()) <= 700


def test_the_files_that_contributing_names_are_there():
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "contributing").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = {name for name in re.findall(r"`([^`\s]+/[^`\s]*)`", text) if "<" not in name} - {"docs/_build/html"}
    assert len(named) >= 40
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_straight_line_is_eight_files_that_exist():
    text = (ROOT / "docs" / "explanation" / "straight-line.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d+\. \[`(.*?)`\]\((.*?)\)", text, re.MULTILINE)
    assert len(files) <= 8
    for name, target in files:
        path = (ROOT / "docs" / "explanation" / target).resolve()
        assert path.is_file(), name
        assert path.as_posix().endswith(name)


def test_every_module_says_first_what_it_is_for():
    for path in [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        assert path.read_text(encoding="utf-8").startswith(('"""', 'r"""')), path


def test_yaml_blocks_of_the_documentation_are_yaml():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")]:
        for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            assert isinstance(yaml.safe_load(textwrap.dedent(text)), dict), page


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 100


def test_the_readme_s_times_are_the_benchmarks():
    pages = {
        name: (ROOT / "docs" / "benchmarks" / name).read_text() for name in re.findall(r"benchmarks/(\w+\.md)", README)
    }
    for before, after, name in re.findall(r"(\d+) → (\d+) ms\]\(docs/benchmarks/(\w+\.md)\)", README):
        times = {f"{float(time):.0f}" for time in re.findall(r"\| ([\d.]+) \(", pages[name])}
        assert {before, after} <= times, name


def test_the_headline_picture_has_the_benchmarks_figures():
    drawn = re.findall(r">([^<>]*)</text>", PICTURE.read_text(encoding="utf-8"))
    for page, title in MODELS.items():
        assert title in [html.unescape(text) for text in drawn]
        assert {str(step) for step in steps(page).values()} <= {*drawn}, "run: make generate"


def test_the_plot_of_kernels_has_the_benchmarks_figures():
    drawn = [html.unescape(each) for each in re.findall(r">([^<>]*)</text>", headline.PICTURE.read_text("utf-8"))]
    wanted = [text for name, _, behind in headline.bars() for text in (name, behind)]
    assert {*wanted} <= {*drawn}, "run: make generate"
