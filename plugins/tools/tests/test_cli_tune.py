"""``veomni tune``: a planted slow and a planted wrong kernel are not chosen, and what can't be measured says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# Both are ranked above every other kernel. The wrong one is fast, and the slow one is right; it is slow at the model's
# width alone, since its check calls it thousands of times.
PLANTED = """
    import time
    from veomni_core import CommandSpec, JobConditions, KernelSpec, hookimpl
    from veomni_core.jobs.jobfile import load_yaml
    VEOMNI_PLUGIN_API_VERSION = 1

    def wrong(x, weight, eps):
        return x * weight

    def slow(x, weight, eps):
        from veomni_ops.rms_norm import standard
        if x.shape[-1] == 80:
            time.sleep(0.1)
        return standard(x, weight, eps)

    @hookimpl
    def veomni_kernels():
        def spec(name, preference, factory="{module}:"):
            return KernelSpec(name, "rms_norm", "standard", factory + name, preference=preference, dtypes=("float32",))

        return [spec("wrong", 99), spec("slow", 98), spec("standard", 20, "veomni_ops.rms_norm:")]

    def steps(path, hardware, changes=()):
        steps = load_yaml(path)["steps"]
        batch = tuple(steps["batch"]) if steps["batch"] else None
        dtype = steps.get("dtype", "float32")
        return JobConditions(dtype=dtype, batch=batch, device="cpu", needs_accelerator=steps.get("gpu", False))

    @hookimpl
    def veomni_commands():
        return [CommandSpec("steps", "{module}:steps", job_check="{module}:steps")]
"""
JOB = """
model:
  config:
    {model_type: llama, vocab_size: 64, hidden_size: 80, intermediate_size: 48, num_hidden_layers: 3,
     num_attention_heads: 4}
  ops_implementation: {preset: eager, rms_norm_implementation: auto}
steps: {batch: [2, 8]}
"""


@pytest.fixture
def run(veomni, install, tmp_path):
    """Runs ``veomni`` with the planted plugin alone, and with a cache of its own."""
    install("planted", PLANTED)
    only = {"VEOMNI_PLUGINS": "planted", "VEOMNI_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    (tmp_path / "job.yaml").write_text(JOB)
    return lambda *arguments, **more: veomni(*arguments, **only, **more)


def norms(text):
    (op,) = [op for op in json.loads(text)["ops"] if op["op_name"] == "rms_norm"]
    return {(site["kernel"], site["reason"]) for site in op["sites"]}


def test_a_planted_slow_and_a_planted_wrong_kernel_are_not_chosen(run):
    assert {kernel for kernel, _ in norms(run("plan", "job.yaml", "--json"))} == {"eager"}  # nobody has looked yet
    said = run("tune", "job.yaml", "--seconds", "0")
    assert "wrong was not measured: failed its check in float32" in said
    assert "auto goes by it" in said
    decided = norms(run("plan", "job.yaml", "--json"))
    assert {kernel for kernel, _ in decided} <= {"standard", "eager"}
    assert all("chosen by measurement: " in why and ", slow " in why for _, why in decided)
    again = json.loads(run("tune", "job.yaml", "--seconds", "0", "--json"))  # certified by now: nothing is checked
    assert set(again["chosen"].values()) - {None} <= {"standard", "eager"} and set(again["by_rank"].values()) <= {
        "slow",
        "eager",
    }
    says = [words for where, words in again["says"].items() if where.startswith("rms_norm")]
    assert all(words.startswith(("standard; ", "eager; ")) for words in says) and len(says) == 3
    assert all(words.endswith("as fast as slow, the choice by rank") for words in says)
    profile, drawn = Path(again["profile"]), Path(again["picture"])
    assert profile.suffix == ".json" and drawn.read_text().startswith("<svg ") and drawn.stem == profile.stem
    assert again["digest"] in run("plan", "job.yaml")
    for site in again["measured"]["sites"]:
        if site["kind"]["op_name"] == "rms_norm":
            assert {each["kernel"] for each in site["contenders"] if each["times"]} == {"standard", "slow", "eager"}
    profile.write_text("{")
    refused = run("plan", "job.yaml", code=1)
    assert f"{profile} is no profile of veomni tune, or is damaged" in " ".join(refused.split())


@pytest.mark.parametrize(
    ("steps", "code", "words"),
    [
        ("{batch: }", 2, "has no steps that veomni tune measures"),
        (
            "{batch: [2, 8], gpu: true}",
            1,
            "names a GPU (train.device), but this machine has cpu (CPU): run veomni tune",
        ),
    ],
)
def test_what_can_t_be_measured_is_refused(run, tmp_path, steps, code, words):
    (tmp_path / "job.yaml").write_text(JOB.replace("{batch: [2, 8]}", steps))
    assert words in " ".join(run("tune", "job.yaml", code=code, fresh=code == 2).split())
    assert not (tmp_path / "cache" / "profiles").exists()


def test_a_step_that_can_t_be_run_is_an_error(run, tmp_path):
    # In bfloat16, which none of the kernels is for: so none is checked first.
    (tmp_path / "job.yaml").write_text(JOB.replace("[2, 8]", "[2, 0], dtype: bfloat16"))
    assert "a step of llama, 2 x 0 tokens can't be run here" in " ".join(run("tune", "job.yaml", code=1).split())
