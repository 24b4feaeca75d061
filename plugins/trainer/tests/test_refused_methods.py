"""``train.method``: the jobs that can't be, and the rewards that judge wrongly, each with its answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from post_training import needs_examples
from typer.testing import CliRunner

from veomni_core.cli.app import build_app
from veomni_core.errors import ConfigError, HostError, JobFileError, TrainingDivergedError, VeOmniError

Go = Callable[..., bool]
pytestmark = needs_examples

# What can't be: changes of a job, what is written into its folder before, the error, and words of its message.
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
REFUSED: list[tuple[str, list[str], dict[str, str], type[VeOmniError], list[str]]] = [
    ("dpo", ["train.method=sft"], {}, JobFileError, ["dpo has the settings of method: dpo", "method is sft"]),
    ("grpo", ["train.grpo=null"], {}, JobFileError, ["method: grpo needs grpo.reward"]),
    ("dpo", ["train.method=pdo"], {}, JobFileError, ["train.method", "'pdo'"]),
    ("dpo", ["train.dpo.beta=0"], {}, JobFileError, ["train.dpo.beta", "must be greater than 0"]),
    ("grpo", ["train.grpo.temperature=0"], {}, JobFileError, ["train.grpo.temperature", "must be greater than 0"]),
    ("grpo", ["train.grpo.temperature=-1"], {}, JobFileError, ["train.grpo.temperature", "must be greater than 0"]),
    ("dpo", ["data.packing=true"], {}, JobFileError, ["train.method: dpo does not go with data.packing"]),
    ("sft", ["train.shadow=1"], {}, JobFileError, ["train.method: sft does not go with train.shadow"]),
    ("grpo", ["data.validation_fraction=0.1"], {}, JobFileError, ["does not go with data.validation_fraction"]),
    ("dpo", ["train.sp_size=2"], {}, JobFileError, ["tested over models that are sharded by fsdp_size alone"]),
    ("grpo", ["data.sequence_length=16"], {}, JobFileError, ["leaves no room for a prompt"]),
    ("grpo", ["data.sequence_length=20"], {}, JobFileError, ["prompt 1 has", "leaves 4 beside"]),
    ("grpo", ["train.batch_size=6"], {}, ConfigError, ["num_generations: 4 does not divide the 6 completions"]),
    ("dpo", ["data.tokenizer=bytes"], {}, JobFileError, ["no chat template"]),
    (
        "dpo",
        ["data.tokenizer=bytes"],
        {"pairs/capitals.jsonl": json.dumps(PAIR)},
        ConfigError,
        ["needs a tokenizer of transformers, and data.tokenizer is bytes"],
    ),
    ("sft", ["data.files=pairs"], {}, JobFileError, ["pairs", "data.columns"]),
    (
        "dpo",
        ["data.files=prompts"],
        {},
        JobFileError,
        ["has no column 'chosen' and no 'rejected'", "prompt, answer"],
    ),
    ("dpo", ["data.files=rewards.py"], {}, JobFileError, ["rewards.py is text", "prompt, chosen, rejected"]),
    ("dpo", [], {"pairs/capitals.jsonl": json.dumps(PAIR) + "\n{"}, JobFileError, ["capitals.jsonl, line 2", "skip"]),
    (
        "dpo",
        [],
        {"pairs/capitals.jsonl": json.dumps({**PAIR, "chosen": ""})},
        JobFileError,
        ["line 1: column 'chosen' is empty"],
    ),
    (
        "dpo",
        [],
        {"pairs/capitals.jsonl": json.dumps({**PAIR, "chosen": 3})},
        JobFileError,
        ["column 'chosen' must be text or a list of messages", "3"],
    ),
    (
        "dpo",
        [],
        {"pairs/capitals.jsonl": json.dumps({**PAIR, "chosen": [{"role": "assistant", "content": "a"}]})},
        JobFileError,
        ["must all be text, or all be chats"],
    ),
    ("dpo", [], {"pairs/capitals.jsonl": json.dumps(PAIR)}, JobFileError, ["gives 1 sequences", "one step takes 4"]),
    (
        "grpo",
        [],
        {"prompts/capitals.jsonl": '{"prompt": "a", "answer": 3}\n{"prompt": "b", "answer": "x"}'},
        JobFileError,
        ["don't fit into one table", "values of several kinds"],
    ),
    ("dpo", ["data.sequence_length=12"], {}, JobFileError, ["prompt 1 has", "leaves 11 beside the first token"]),
    ("grpo", ["train.grpo.reward=rewards.py"], {}, JobFileError, ["'rewards.py' names no function"]),
    (
        "grpo",
        ["train.grpo.reward=rewards.py:length"],
        {},
        JobFileError,
        ["no function 'length'", "brevity, contains_answer"],
    ),
    ("grpo", ["train.grpo.reward=[]"], {}, JobFileError, ["reward is an empty list; name a function"]),
    ("grpo", ["train.grpo.reward=[a.py:score, b.py:score]"], {}, JobFileError, ["reward names score twice"]),
    ("dpo", ["data.loss_on=all"], {}, JobFileError, ["method: dpo does not go with data.loss_on: all"]),
    (
        "classify",
        ["data.columns={text: body}", "data.prompt_format=chat"],
        {},
        JobFileError,
        ["data.columns (name the columns in train.classify) and data.prompt_format; leave that out"],
    ),
    ("grpo", ["train.grpo.reward=reward.py:f"], {}, JobFileError, ["reward.py. Did you mean 'rewards.py'?"]),
    ("grpo", ["train.grpo.reward=no_such_module:f"], {}, JobFileError, ["can't be imported: ModuleNotFoundError"]),
    ("kto", ["train.method=dpo", "train.dpo=null"], {}, JobFileError, ["kto has the settings of method: kto"]),
    ("kto", ["train.batch_size=1"], {}, JobFileError, ["measures the divergence on the other rows of a batch"]),
    ("kto", ["data.files=pairs"], {}, JobFileError, ["has no column 'completion' and no 'label'"]),
    (
        "kto",
        [],
        {"verdicts/capitals.jsonl": json.dumps({"prompt": "a", "completion": "b", "label": "maybe"})},
        JobFileError,
        ["line 1: column 'label' must be true or false", "maybe"],
    ),
    ("orpo", ["train.orpo.beta=0"], {}, JobFileError, ["train.orpo.beta", "must be greater than 0"]),
    ("rloo", ["train.rloo=null"], {}, JobFileError, ["method: rloo needs rloo.reward"]),
    ("rloo", ["train.batch_size=6"], {}, ConfigError, ["train.rloo.num_generations: 4 does not divide the 6"]),
    ("rloo", ["train.rloo.reward=rewards.py:length"], {}, JobFileError, ["train.rloo.reward:", "no function 'length'"]),
    ("reward", ["data.packing=true"], {}, JobFileError, ["train.method: reward does not go with data.packing"]),
    ("reward", ["train.tp_size=2"], {}, JobFileError, ["tested over models that are sharded by fsdp_size alone"]),
    ("grpo", ["train.fsdp_size=2"], {}, JobFileError, ["draws completions that end at different lengths"]),
    ("classify", ["train.classify.label=kind"], {}, JobFileError, ["has no column 'kind'", "text, label"]),
    ("classify", ["train.classify.labels=[answer]"], {}, JobFileError, ["train.classify.labels"]),
    (
        "classify",
        ["train.classify.labels=[a, b]"],
        {},
        JobFileError,
        ["the label 'answer'", "train.classify.labels: a, b"],
    ),
    ("classify", ["data.tokenizer=bytes"], {}, ConfigError, ["needs a tokenizer of transformers"]),
    (
        "grpo",
        ["data.files=chats"],
        {},
        JobFileError,
        ["'messages' ends with an answer, which would be part of the pro"],
    ),
    (
        "dpo",
        [],
        {"pairs/capitals.jsonl": json.dumps({**PAIR, "chosen": "[{'role': 'assistant', 'content': 'b'}]"})},
        JobFileError,
        ["line 1: the chat must be a list, or one as JSON"],
    ),
    ("grpo", ["train.grpo.reward=r.py:f"], {"r.py": "import sys\nsys.exit(0)"}, JobFileError, ["imported: SystemExit"]),
    (
        "dpo",
        ["model.ops_implementation={preset: auto, cross_entropy_loss_implementation: chunk_loss}"],
        {},
        ConfigError,
        ["would never run: cross_entropy_loss_implementation: chunk_loss"],
    ),
]


@pytest.mark.thorough(one_per=["method"])
@pytest.mark.parametrize(("method", "changes", "files", "error", "words"), REFUSED)
def test_what_can_t_be_is_answered_and_loses_nothing(
    here: Path, method: str, changes: list[str], files: dict[str, str], error: type[VeOmniError], words: list[str]
) -> None:
    for name, text in files.items():
        (here / name).write_text(text + "\n", encoding="utf-8")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    sets = [part for change in ("train.output_dir=" + str(here / "run"), *changes) for part in ("--set", change)]
    for last in ([], ["--dry-run"]):
        raised = CliRunner().invoke(build_app(), ["train", str(here / f"{method}.yaml"), *sets, *last]).exception
        assert type(raised) is error, repr(raised)
        assert [word for word in words if word not in str(raised)] == [], str(raised)
    after = {path: path.read_bytes() for path in here.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert after == before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        ("[1.0]", JobFileError, "returned 1 values for 8 completions; return a list with a number for each"),
        ("1.0", JobFileError, "returned a float for 8 completions"),
        ("['good'] * 8", JobFileError, "returned 'good' for a completion; return a number or None"),
        ("[float('nan')] * 8", TrainingDivergedError, "returned nan for the completion"),
        ("[1.0] * 8", JobFileError, "the same reward in all 10 steps, so nothing was learned; reward what differs"),
        ("exit()", JobFileError, "raised SystemExit"),
        ("[None] * 8", JobFileError, "judge returned None for every completion up to step 1, so nothing is learned"),
    ],
)
def test_a_reward_that_judges_wrongly(here: Path, go: Go, returned: str, error: type[Exception], words: str) -> None:
    (here / "wrong.py").write_text(f"def judge(completions, **columns):\n    return {returned}\n", encoding="utf-8")
    with pytest.raises(error, match=words):
        go("grpo", "train.grpo.reward=wrong.py:judge")


@pytest.mark.thorough
def test_a_reward_without_the_keywords_is_told_which(here: Path, go: Go) -> None:
    (here / "wrong.py").write_text("def judge(completions):\n    return [1.0]\n", encoding="utf-8")
    with pytest.raises(JobFileError, match=r"it is given prompts, completions and .*answer.*; write def judge\("):
        go("grpo", "train.grpo.reward=wrong.py:judge")


@pytest.mark.thorough
def test_numbers_of_numpy_and_turns_as_json_are_read(here: Path, go: Go) -> None:
    reward = "import numpy\ndef judge(completions, **columns):\n    return [*numpy.arange(8, dtype='float32')]\n"
    (here / "right.py").write_text(reward, encoding="utf-8")
    go("grpo", "train.grpo.reward=right.py:judge", "train.steps=1")
    lines = (here / "chats" / "capitals.jsonl").read_text(encoding="utf-8").splitlines()
    losses = []
    for as_text in (False, True):
        rows = [{"messages": json.loads(line)["messages"]} for line in lines]
        rows = [{"messages": json.dumps(row["messages"])} for row in rows] if as_text else rows
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (here / "chats" / "capitals.jsonl").write_text(text, encoding="utf-8")
        go("sft", "train.steps=2", overwrite=True)
        found = (here / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses.append([json.loads(line)["loss"] for line in found])
    assert losses[0] == losses[1]


@pytest.mark.thorough
def test_broken_lines_are_left_out_where_the_job_says_so(here: Path, go: Go) -> None:
    data = here / "pairs" / "capitals.jsonl"
    data.write_text(data.read_text(encoding="utf-8") + "{broken\n", encoding="utf-8")
    go("dpo", "train.steps=1", "data.bad_lines=skip")
    assert "1 bad lines" in (here / "run" / "report.html").read_text(encoding="utf-8")


def test_without_trl_the_job_says_what_to_install(here: Path, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veomni_trainer.job.method_packages.version", lambda name: "1.9.0")
    with pytest.raises(HostError, match=r"train.method: dpo needs trl 1.16 or newer, and 1.9.0 is here: pip install"):
        go("dpo")
