"""Runs the blocks of one page of the documentation, as its reader would: in order, in one folder."""

from __future__ import annotations

import contextlib
import doctest
import functools
import io
import json
import os
import re
import shlex
import site
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from documented_code import ROOT, SHELLS, Block, blocks, commands
from veomni_core import Site, find_sites, plan_sites
from veomni_core.cli import exit_code, show_error
from veomni_core.cli.app import build_app
from veomni_core.errors import VeOmniError
from veomni_trainer.job.load import parse_job

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131072,
}
_DATA = {"files": "python-stdlib", "sequence_length": 128}


class PageRun:
    """One reading of a page.

    Args:
        folder: the working directory of the page's commands; the caller has changed to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""
        self._programs: Mapping[str, Callable[[list[str]], tuple[int, str]]] = {
            "veomni": _veomni,
            "pip": self._pip,
            "python": _python,
            # Standalone: other tests may hold the port that is the default.
            "torchrun": lambda words: _python(["-m", "torch.distributed.run", "--standalone", *words]),
        }

    def run(self, page: Path) -> None:
        """Run every block that the page doesn't leave to others.

        Raises:
            AssertionError: a block fails, prints something else than the page says, or is of no kind that can be run.
        """
        for block in blocks(page):
            if block.is_run:
                try:
                    self._run(block)
                except Exception as error:
                    raise AssertionError(f"{block}: {error}") from error

    def _run(self, block: Block) -> None:
        if block.file:
            self._write(block)
        if block.mark == "output":
            check_output(block.text, self._printed)
        elif block.language == "yaml":
            self._yaml(block)
        elif block.language == "python" and block.file:
            compile(block.text, block.file, "exec")
        elif block.language == "python":
            self._python(block)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            for line in block.text.splitlines():
                json.loads(line)
        elif block.language in SHELLS:
            self._console(block)
        else:
            raise AssertionError(f"a block of {block.language!r} is not run: say why not, in a mark above it")

    def _write(self, block: Block) -> None:
        path = self._folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")

    def _python(self, block: Block) -> None:
        if ">>>" in block.text:
            test = doctest.DocTestParser().get_doctest(block.text, self._names, str(block), str(block.page), block.line)
            report: list[str] = []
            doctest.DocTestRunner(optionflags=_FLAGS).run(test, out=report.append, clear_globs=False)
            self._names = test.globs
            assert not report, "".join(report)
            return
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block.text, str(block), "exec"), self._names)
        self._printed = printed.getvalue()

    def _yaml(self, block: Block) -> None:
        """Plan a job; of a page that shows a part of one, read it as a job, and plan it for a small model's sites."""
        written, hardware = yaml.safe_load(block.text), block.value("planned for ")
        assert isinstance(written, dict), "this YAML is no mapping"
        model = written.get("model", {})
        if {"config", "config_path", "weights", "path"} & model.keys():
            path = self._folder / (block.file or "job.yaml")
            path.write_text(block.text, encoding="utf-8")
            code, printed = _veomni(["plan", path.name, *(["--hardware", hardware] if hardware else [])])
            assert code == 0, printed
            return
        data, train = written.get("data", {}), written.get("train", {})
        given = {"files"} if "sources" in data else set()
        job = {
            **written,
            "model": {"config": _MODEL, **model},
            "data": {key: value for key, value in _DATA.items() if key not in given} | data,
            "train": {"output_dir": "runs/a"} | ({} if "epochs" in train else {"steps": 1}) | train,
        }
        parse_job(job)
        if kernels := model.get("ops_implementation"):
            plan_sites(_sites(), kernels, hardware=hardware or None)

    def _console(self, block: Block) -> None:
        run = list(commands(block))
        for number, (command, expected) in enumerate(run, 1):
            last = number == len(run)
            code, self._printed = self._command(command)
            wanted = int(block.value("exits with ") or 0) if last else 0
            assert code == wanted, f"`{command}` ends with {code}, not {wanted}:\n{self._printed}"
            if expected:
                check_output(expected, self._printed)

    def _command(self, command: str) -> tuple[int, str]:
        words = shlex.split(command)
        if words[0] not in self._programs:
            raise AssertionError(f"`{command}` is no command that a test runs: say why not, in a mark above the block")
        return self._programs[words[0]](words[1:])

    def _pip(self, words: list[str]) -> tuple[int, str]:
        """A distribution in a folder is installed beside the page; a published one must be named as it is published."""
        verb, *named = [word for word in words if word != "-e"]
        assert verb == "install", f"pip {verb} is not run"
        for name in (name for name in named if not name.startswith(("-", ".", "/"))):
            _check_published(name)
        folders = [name for name in named if name.startswith(".")]
        if not folders:
            return 0, ""
        target = self._folder / "site"
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
        code, printed = _python(["-m", "pip", "install", *options, *(["-e"] if "-e" in words else []), *folders])
        site.addsitedir(str(target))
        linked = [path.read_text().strip() for path in target.glob("*.pth")]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(target), *linked, os.environ.get("PYTHONPATH", "")])
        return code, printed


def _veomni(words: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), words)
    if isinstance(result.exception, VeOmniError):  # as `main` does
        return exit_code(result.exception), f"{result.output}{show_error(result.exception)}\n"
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def _python(words: list[str]) -> tuple[int, str]:
    if words[:2] == ["-m", "build"]:
        words = [*words, "--no-isolation"]  # the backend that is installed here
    result = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return result.returncode, result.stdout


@functools.cache
def _sites() -> list[Site]:
    """The sites of a mixture of experts with a dense layer, which has all that a language model can have."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**_MODEL), dtype=torch.bfloat16)
    return find_sites(model)


def _check_published(name: str) -> None:
    distribution, extras = re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?.*", name).groups()  # type: ignore[union-attr]
    if not distribution.startswith("veomni-"):
        return
    for file in [ROOT / "core" / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == distribution:
            missing = {*(extras or "").split(",")} - {"", *project.get("optional-dependencies", {})}
            assert not missing, f"{distribution} has no extra {sorted(missing)}"
            return
    raise AssertionError(f"there is no distribution {distribution}")


def check_output(expected: str, printed: str) -> None:
    """Compare what is printed with what a page says, as doctest does."""
    checker = doctest.OutputChecker()
    if not checker.check_output(expected, printed, _FLAGS):
        raise AssertionError(checker.output_difference(doctest.Example("", expected), printed, _FLAGS))
