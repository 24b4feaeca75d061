"""Both engines of LLaMA-Factory, in the versions that it pins: the losses of the job without our kernels.

The files are those of bridges.md. LLaMA-Factory is the real one. Only torchaudio, whose wheel on PyPI needs CUDA and
which it calls for audio alone, is an empty module.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from foreign_trainings import error_of, lines, measured, run_scripts, save_model, write_files_of_page, write_lines
from tiny_training import close

from veomni_bridges.llama_factory import kernels
from veomni_core.errors import ConfigError, UnknownNameError

# LLaMA-Factory, the versions that it pins or that those need, and what else its way to a training imports.
LLAMA_FACTORY = (
    "llamafactory==0.9.5",
    *("accelerate==1.11.0", "datasets==4.0.0", "peft==0.18.1", "transformers==5.6.0", "trl==0.24.0"),
    *("dill==0.3.8", "fsspec==2025.3.0", "huggingface_hub==1.33.0", "kernels==0.12.3", "multiprocess==0.70.16"),
    *("antlr4-python3-runtime==4.9.3", "av==18.1.0", "httpcore==1.0.9", "httpx==0.28.1", "omegaconf==2.3.0"),
    *("tokenizers==0.22.2", "torchdata==0.11.0"),
)
ON_A_CPU = "use_cpu=true"
LORA = {
    "train.py": ["finetuning_type=lora", "lora_rank=4"],
    "train_v1.py": ["peft_config.name=lora", "peft_config.r=4"],
}
JOBS = {"train.py": ["job.yaml", ON_A_CPU], "train_v1.py": ["job_v1.yaml"]}
EAGER = {
    "eager.py": "from llamafactory.train.tuner import run_exp\n\nrun_exp()\n",
    "eager_v1.py": "from llamafactory.v1.trainers.sft_trainer import run_sft\n\nrun_sft()\n",
}
REFUSED = {
    "liger": ("train.py", ["enable_liger_kernel=true"], "BindingError: .*forwards of liger_kernel are in the model"),
    "sharded": ("train_v1.py", ["dist_config.name=fsdp2"], "BindingError: the job has dist_config: .*fsdp2"),
    "no preset": ("train_v1.py", ["kernel_config.include_kernels=true"], "ConfigError: .*names no preset"),
    "misspelt": ("train_v1.py", ["kernel_config.include_kernels=atuo"], "UnknownNameError: .*atuo"),
}


def _pairs() -> dict[str, tuple[str, list[str]]]:
    """The run of each engine's script, and of the job without kernels; and both with an adapter."""
    runs = {}
    for script, arguments in JOBS.items():
        eager = script.replace("train", "eager")
        without = ["kernel_config=null"] if script == "train_v1.py" else []
        for kind, more in {"full": [], "lora": LORA[script]}.items():
            runs[f"{script} {kind}"] = (script, [*arguments, *more])
            runs[f"{eager} {kind}"] = (eager, [*arguments, *more, *without])
    return runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each job was run."""
    folder = tmp_path_factory.mktemp("llama_factory")
    save_model(folder / "base")
    write_files_of_page(__file__, folder)
    for name, text in EAGER.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "torchaudio.py").touch()
    said = [(f"say {number}", f"the quick brown fox {number}") for number in range(64)]
    write_lines(folder / "sentences.jsonl", [{"instruction": a, "input": "", "output": b} for a, b in said])
    (folder / "dataset_info.json").write_text(json.dumps({"sentences": {"file_name": "sentences.jsonl"}}))
    write_lines(folder / "chats.jsonl", [{"messages": [_turn("user", a), _turn("assistant", b)]} for a, b in said])

    runs = _pairs() | {name: (script, [*JOBS[script], *more]) for name, (script, more, _) in REFUSED.items()}
    asked = {
        "modules": [
            "llamafactory.train.tuner",
            "llamafactory.v1.trainers.sft_trainer",
            "llamafactory.v1.plugins.model_plugins.kernels.interface",
        ],
        "registries": [
            ("llamafactory.v1.utils.plugin", "BasePlugin._registry"),
            ("llamafactory.v1.plugins.model_plugins.kernels.registry", "Registry._kernels"),
        ],
        "bridge": "veomni_bridges.llama_factory",
        "runs": {name: (script, [*more, f"output_dir=./out/{name}"]) for name, (script, more) in runs.items()},
    }
    run_scripts(folder, asked, *LLAMA_FACTORY, more=(folder,))
    return folder


def _turn(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": float(role == "assistant")}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_losses_of_the_trainer_are_those_without_kernels(folder: Path, kind: str) -> None:
    bound, eager = (
        measured(json.loads((folder / "out" / f"{script} {kind}" / "trainer_state.json").read_text())["log_history"])
        for script in ("train.py", "eager.py")
    )
    assert len(bound) == 8 and close(bound, eager)
    receipt = json.loads((folder / "out" / f"train.py {kind}" / "veomni_receipt.json").read_text())
    chosen = {op["op"]: op["chosen"] for op in receipt["ops"]}
    assert chosen["rms_norm"] == ["torch"] and chosen["swiglu_mlp"] == ["torch"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_losses_of_the_v1_engine_are_those_without_kernels(folder: Path, kind: str) -> None:
    bound, eager = (
        measured(lines(folder / "out" / f"{script} {kind}" / "trainer_log.jsonl"))
        for script in ("train_v1.py", "eager_v1.py")
    )
    assert len(bound) == 8 and close(bound, eager)
    printed = (folder / f"train_v1.py {kind}.log").read_text(encoding="utf-8")
    assert "swiglu_mlp_implementation" in printed and "compute the loss from the logits" in printed
    assert "Bound on" not in (folder / f"eager_v1.py {kind}.log").read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize("job", REFUSED)
def test_a_job_that_cannot_be_bound_is_refused(folder: Path, job: str) -> None:
    error = error_of(folder, job)
    assert re.match(REFUSED[job][2], error), error


@pytest.mark.thorough
def test_importing_the_bridge_changes_nothing_of_the_libraries(folder: Path) -> None:
    assert json.loads((folder / "changed.json").read_text()) == []


def test_what_would_never_take_effect_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="write it as include_kernels under kernel_config"):
        kernels(preset="auto")
    with pytest.raises(ConfigError, match="v1 trainers compute the loss themselves.*chunk_loss"):
        kernels(cross_entropy_loss_implementation="chunk_loss")
    with pytest.raises(UnknownNameError, match="tirton"):
        kernels(rms_norm_implementation="tirton")
