"""The command line, run as people run it: in processes, with exit codes 0 good, 1 falls short, 2 bad usage."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from veomni_core.cli import show_error
from veomni_core.errors import UnknownNameError

JOB = """
model:
  config:
    model_type: qwen3_moe
    hidden_size: 32
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 8
    num_experts: 4
    num_experts_per_tok: 2
    moe_intermediate_size: 24
    vocab_size: 64
    output_router_logits: true
  ops_implementation: {ops}
"""

WITH_COMMAND = """
    from veomni_core import CommandSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1

    def greet(name: str) -> None:
        print(f"hello {name}")

    @hookimpl
    def veomni_commands():
        return [CommandSpec("greet", "{module}:greet", "Greets somebody.")]
"""


WITH_APPLICATION = """
    import typer
    from typer.core import TyperCommand
    from veomni_core import CommandSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1
    application = typer.Typer(add_completion=False)

    class Loud(TyperCommand):
        def parse_args(self, ctx, args):
            return super().parse_args(ctx, [arg.upper() for arg in args])

    @application.command(cls=Loud)
    def greet(name: str) -> None:
        print(f"hello {name}")

    @hookimpl
    def veomni_commands():
        return [CommandSpec("shout", "{module}:application", "Greets somebody aloud.")]
"""


@pytest.fixture
def job(tmp_path):
    def write(ops="{preset: eager}", text=JOB):
        path = tmp_path / "job.yaml"
        path.write_text(textwrap.dedent(text).replace("{ops}", ops))
        return path

    return write


def test_list(veomni, install, install_healthy):
    install_healthy("good-plugin", "good")
    install("bad-plugin", "import a_library_that_is_not_here", version="3.1")
    text = veomni("list")
    assert "good-plugin" in text and "failed: ModuleNotFoundError" in text
    data = json.loads(veomni("list", "--json"))
    plugins = {plugin["name"]: plugin for plugin in data["plugins"]}
    assert plugins["good-plugin"]["kernels"] == ["rms_norm/standard:good"]
    assert plugins["bad-plugin"]["status"] == "failed" and "Traceback" in plugins["bad-plugin"]["traceback"]
    (norm,) = [op for op in data["ops"] if op["op"] == "rms_norm"]
    assert "good" in [kernel["name"] for kernel in norm["variants"]["standard"]]


def test_plan(veomni, job, install_healthy):
    install_healthy("good-plugin", "good")
    path = job("{preset: eager, rms_norm_implementation: good}")
    assert "rms_norm_implementation" in veomni("plan", path)
    data = json.loads(veomni("plan", path, "--hardware", "h200", "--json"))
    (norm,) = [op for op in data["ops"] if op["op_name"] == "rms_norm"]
    assert {site["kernel"] for site in norm["sites"]} == {"good"} and len(norm["sites"]) == 9


def test_plan_on_hardware_that_falls_short(veomni, job):
    text = veomni("plan", job("{preset: gpu}"), "--hardware", "mps", code=1)
    assert text.count("Usable:") >= 6 and "attn_implementation" in text


@pytest.mark.parametrize(
    "ops, message",
    [
        ("{rms_norm_implementaton: torch}", "no such field. Did you mean 'rms_norm_implementation'"),
        ("{preset: gpus}", "preset: 'gpus' is unknown. Did you mean 'gpu'"),
        ("", "model.ops_implementation is missing"),
        ("{preset: auto, preset: eager}", "key 'preset' appears twice"),
    ],
)
def test_plan_of_a_bad_job(veomni, job, ops, message):
    assert message in veomni("plan", job(ops), code=2)


def test_plan_of_an_unknown_model_type(veomni, job):
    path = job(text=JOB.replace("qwen3_moe", "qwen3_mo"))
    assert "model_type 'qwen3_mo' is unknown. Did you mean 'qwen3_moe'" in veomni("plan", path, code=2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["explain", "rms_nom"], "op 'rms_nom' is not registered. Did you mean 'rms_norm'"),
        (["explain", "rms_norm", "--hardware", "h20"], "hardware 'h20' is not known. Did you mean 'h200'"),
        (["verify", "veomni-nothing"], "plugin 'veomni-nothing' is not installed."),
        (["plan", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["lst"], "No such command 'lst'"),
        (["list", "--jsn"], "No such option: --jsn"),
    ],
)
def test_bad_usage(veomni, arguments, message):
    assert message in veomni(*arguments, code=2)


def test_a_plugin_brings_a_verb(veomni, install):
    install("greeting-plugin", WITH_COMMAND)
    assert veomni("greet", "world").strip() == "hello world"
    assert "Greets somebody." in veomni("--help")
    install("shouting-plugin", WITH_APPLICATION)
    assert veomni("shout", "world").strip() == "hello WORLD"


def test_help_loads_no_torch(veomni):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "veomni_core.cli", "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert " torch" not in done.stderr


def test_an_error_s_last_word_is_its_class():
    assert show_error(UnknownNameError("'egaer' is unknown")) == "error: 'egaer' is unknown [UnknownNameError]"
