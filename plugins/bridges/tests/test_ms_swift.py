"""Our callback in ms-swift itself, in versions that it allows: the losses of the job without it.

The files are those of bridges.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from foreign_trainings import error_of, measured, run_scripts, save_model, write_files_of_page, write_lines
from tiny_training import close, llama

from installed_beside import installed_beside
from veomni_bridges.ms_swift import kernels
from veomni_core.errors import BindingError, ConfigError, HostError, UnknownNameError

# ms-swift, the newest versions that it allows, and what else its way to a training imports.
MS_SWIFT = (
    "ms_swift==4.6.0",
    *("accelerate==1.15.0", "datasets==4.8.4", "peft==0.20.0", "transformers==5.19.0", "trl==0.29.1"),
    *("einops==0.8.2", "httpcore==1.0.9", "httpx==0.28.1", "json_repair==0.64.6", "modelscope==1.40.2"),
    *("modelscope_hub==0.5.1", "simplejson==4.3.0", "zstandard==0.25.0"),
)
SFT = "from swift.pipelines import sft_main\n\nsft_main()\n"
# On a CPU, and without asking a hub whether the model is the latest.
OFFLINE = {"use_cpu": True, "bf16": False, "fp16": False, "torch_dtype": "float32", "check_model": False}
LORA = {"tuner_type": "lora", "lora_rank": 4}
KINDS: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA, "dft": {"enable_dft_loss": True}}


def _options(job: dict[str, Any]) -> list[str]:
    return [word for key, value in job.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each job was run."""
    folder = tmp_path_factory.mktemp("ms_swift")
    save_model(folder / "base")
    write_files_of_page(__file__, folder)
    (folder / "sft.py").write_text(SFT, encoding="utf-8")
    turns = [("user", "say {}"), ("assistant", "the quick brown fox {}")]
    chats = [
        {"messages": [{"role": role, "content": text.format(number)} for role, text in turns]} for number in range(64)
    ]
    write_lines(folder / "chats.jsonl", chats)

    job = {**yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8")), **OFFLINE}
    eager = {key: value for key, value in job.items() if key not in ("external_plugins", "callbacks")}
    jobs = {f"bound {kind}": {**job, **changes} for kind, changes in KINDS.items()}
    jobs |= {f"eager {kind}": {**eager, **changes} for kind, changes in KINDS.items()}
    jobs["liger"] = {**job, "use_liger_kernel": True}
    for name, each in jobs.items():
        each.update(output_dir=f"./out/{name}", add_version=False)
    asked = {
        "modules": ["swift.pipelines", "swift.callbacks", "swift.trainers", "veomni_bridges.transformers"],
        "registries": [("swift.callbacks", "callbacks_map")],
        "bridge": "veomni_bridges.ms_swift",
        "runs": {name: ("sft.py", _options(each)) for name, each in jobs.items()},
    }
    run_scripts(folder, asked, *MS_SWIFT, more=(installed_beside("aiohttp==3.14.5"),))
    return folder


def _run_s_measurements(folder: Path, run: str) -> list[float]:
    (state,) = (folder / "out" / run).glob("checkpoint-4/trainer_state.json")
    return measured(json.loads(state.read_text(encoding="utf-8"))["log_history"])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_the_job_without_the_callback(folder: Path, kind: str) -> None:
    bound, eager = (_run_s_measurements(folder, f"{way} {kind}") for way in ("bound", "eager"))
    assert len(bound) == 8 and close(bound, eager)
    receipt = json.loads((folder / "out" / f"bound {kind}" / "veomni_receipt.json").read_text(encoding="utf-8"))
    chosen = {op["op"]: op["chosen"] for op in receipt["ops"]}
    assert chosen["rms_norm"] == ["torch"] and chosen["swiglu_mlp"] == ["torch"]
    assert not (folder / "out" / f"eager {kind}" / "veomni_receipt.json").exists()
    said = "".join(receipt["notes"])
    assert ("computes the loss itself, by enable_dft_loss: True" in said) == (kind == "dft")


@pytest.mark.thorough
def test_liger_s_own_switch_is_refused(folder: Path) -> None:
    assert re.match("BindingError: .*use_liger_kernel=True replaces forwards", error_of(folder, "liger"))


@pytest.mark.thorough
def test_importing_the_bridge_changes_nothing_of_the_libraries(folder: Path) -> None:
    assert json.loads((folder / "changed.json").read_text()) == []


@pytest.mark.parametrize(
    ("sequence_parallel_size", "tuner_backend", "message"),
    [(2, "peft", "--sequence_parallel_size 1"), (1, "unsloth", "--tuner_backend peft")],
)
def test_what_replaces_the_same_code_is_refused(
    monkeypatch: pytest.MonkeyPatch, sequence_parallel_size: int, tuner_backend: str, message: str
) -> None:
    """With stand-ins for ms-swift's arguments and trainer: Unsloth and several processes are not here."""
    monkeypatch.setattr("veomni_bridges.libraries.version", lambda name: "4.6.0")
    trainer = SimpleNamespace(template=SimpleNamespace(sequence_parallel_size=sequence_parallel_size))
    unset = dict.fromkeys(("deepspeed_plugin", "fsdp_plugin_args", "use_liger_kernel"))
    args = SimpleNamespace(tuner_backend=tuner_backend, **unset)
    with pytest.raises(BindingError, match=message):
        kernels(preset="auto")(args, trainer).on_init_end(args, None, None, model=llama())


def test_a_wrong_config_is_refused_where_it_is_written() -> None:
    with pytest.raises(UnknownNameError, match="tirton"):
        kernels(rms_norm_implementation="tirton")
    with pytest.raises(ConfigError, match="not both"):
        kernels({"preset": "auto"}, preset="auto")


def test_an_older_ms_swift_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veomni_bridges.libraries.version", lambda name: "4.5.0")
    with pytest.raises(HostError, match=r"ms_swift 4.6 or newer, and 4.5.0 is here: .*veomni-bridges\[ms-swift\]"):
        kernels(preset="auto")(None, None).on_init_end(None, None, None)
