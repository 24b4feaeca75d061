"""No header of a safetensors file, and no file of a checkpoint, ends in an untyped error where weights are read."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_configs import LLAMA

from fuzzing import TEXTS, VALUES, bounded, typed_errors
from veomni_core import Hardware, build_foundation_model
from veomni_core.planning.plan import Plan
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.early_ends import has_stopped
from veomni_trainer.output.export import export_checkpoint
from veomni_trainer.output.manifest import MANIFEST, damage
from veomni_trainer.output.shards import LAYOUT, check_layout
from veomni_trainer.run.checkpoints import PLAN, SEQUENCES, check_plan, check_sequences
from veomni_transformers.weights import check_weights

ONE_LAYER = {**LLAMA, "num_hidden_layers": 1, "vocab_size": 16}
NAME = "model.norm.weight"
SIZES = st.sampled_from([0, 1, 32, -1, 2**63, 2**64]) | VALUES
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "U64", "F4", "C64", "F128"]) | VALUES,
        "shape": st.lists(SIZES, max_size=3) | VALUES,
        "data_offsets": st.lists(SIZES, max_size=3) | VALUES,
        "x": VALUES,
    },
)
HEADERS = st.dictionaries(
    st.sampled_from([NAME, "lm_head.weight", "__metadata__"]) | TEXTS, TENSORS | VALUES, max_size=3
)
CHANGES = st.dictionaries(
    st.sampled_from(["dtype", "shape", "data_offsets"]), SIZES | st.lists(SIZES, max_size=3), max_size=2
)
JSON = (VALUES | st.recursive(VALUES, lambda inner: st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5)).map(
    lambda value: json.dumps(value, default=str, skipkeys=True).encode("utf-8", "surrogatepass")
)


def file(header: bytes, length: int | None = None, data: bytes = b"\0" * 128) -> bytes:
    """A safetensors file of this header, which says to be ``length`` bytes."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


FILES = (
    st.builds(file, JSON, st.none() | st.integers(0, 2**64 - 1))
    | st.builds(file, HEADERS.map(lambda header: json.dumps(header, default=str, skipkeys=True).encode()))
    | st.binary(max_size=20)
    | st.sampled_from([file(b"[" * 100_000), file(b'{"__metadata__": {"format": "pt"}}'), file(b"{}", data=b"")])
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of a tiny Llama."""
    folder = tmp_path_factory.mktemp("weights")
    model = build_foundation_model(
        ONE_LAYER, ops_implementation={"preset": "eager"}, torch_dtype="float32", init_device="cpu", device="cpu"
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[], Path]:
    """Makes new folders."""
    numbers = itertools.count()
    return lambda: tmp_path / str(next(numbers))


@bounded(150)
@given(FILES, FILES | JSON | st.none())
def test_weights_are_accepted_or_refused_by_their_headers(
    folders: Callable[[], Path], content: bytes, index: bytes | None
) -> None:
    folder = folders()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    if index is not None:
        (folder / "model.safetensors.index.json").write_bytes(index)
    with typed_errors():
        check_weights(folder)


@pytest.mark.thorough
@bounded(40)
@given(CHANGES, st.sampled_from([None, {}, {"format": "pt"}, {"format": "np"}, {"x": "y"}]), st.booleans())
def test_a_model_is_loaded_or_its_weights_are_refused(
    weights: Path, folders: Callable[[], Path], changes: dict[str, Any], metadata: dict[str, str] | None, drops: bool
) -> None:
    folder = shutil.copytree(weights, folders())
    written = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", written[:8])
    header = json.loads(written[8 : 8 + length])
    header[NAME] |= changes
    header.pop("__metadata__", None)
    if metadata is not None:
        header["__metadata__"] = metadata
    if drops:
        del header["lm_head.weight"]
    text = json.dumps(header, default=str, skipkeys=True).encode()
    (folder / "model.safetensors").write_bytes(file(text, data=written[8 + length :]))
    with typed_errors():
        build_foundation_model(
            folder,
            folder,
            ops_implementation={"preset": "eager"},
            torch_dtype="float32",
            init_device="cpu",
            device="cpu",
        )


@bounded(60)
@given(
    FILES,
    st.sampled_from(["model.safetensors", "shard-00000-model-00001-of-00001.safetensors", "adapter_model.safetensors"]),
    JSON,
)
def test_a_checkpoint_is_exported_or_refused(
    weights: Path, folders: Callable[[], Path], content: bytes, name: str, config: bytes
) -> None:
    checkpoint = folders()
    checkpoint.mkdir()
    shutil.copy(weights / "config.json", checkpoint)
    (checkpoint / name).write_bytes(content)
    if name.startswith("adapter"):
        (checkpoint / "adapter_config.json").write_bytes(config)
    with typed_errors():
        export_checkpoint(checkpoint, folders(), merges_adapter=name.startswith("adapter") and len(content) % 2 == 0)


LAYOUTS = st.dictionaries(
    st.sampled_from(["fsdp_size", "tp_size", "ep_size", "sequences_per_step"]), VALUES, min_size=3
).map(lambda layout: json.dumps(layout, default=str).encode())
PLANS = st.dictionaries(
    st.sampled_from(["hardware", "ops", "kernels", "assumptions", "passed_by", "autocast"]), VALUES, min_size=4
).map(lambda plan: json.dumps(plan, default=str, skipkeys=True).encode())
STATES = st.builds(
    lambda stop: {"stateful_callbacks": {"EarlyStop": stop}}, VALUES | st.fixed_dictionaries({"attributes": VALUES})
)
TRAIN = TrainSection.model_validate(
    {"output_dir": "run", "steps": 4, "batch_size": 2, "validate_every": 1, "early_stop": {"patience": 1}}
)
CONTENTS = (
    JSON
    | LAYOUTS
    | PLANS
    | STATES.map(lambda state: json.dumps(state, default=str, skipkeys=True).encode())
    | st.binary(max_size=12)
    | st.sampled_from([b"[" * 100_000, b"9" * 5000, b"1e999"])
)


@pytest.mark.parametrize("name", [MANIFEST, LAYOUT, PLAN, SEQUENCES, "trainer_state.json"])
@bounded(50)
@given(content=CONTENTS | st.none())
def test_what_a_checkpoint_says_of_itself_is_read_or_refused(
    folders: Callable[[], Path], name: str, content: bytes | None
) -> None:
    checkpoint = folders()
    checkpoint.mkdir()
    if content is not None:
        (checkpoint / name).write_bytes(content)
    plan = Plan(hardware=Hardware.cpu(), ops=(), kernels=())
    with typed_errors():
        if name == MANIFEST:
            damage(checkpoint)
        elif name == LAYOUT:
            check_layout(checkpoint, {"sequences_per_step": 4})
        elif name == PLAN:
            check_plan(checkpoint, plan, accept_change=True)
        elif name == "trainer_state.json":
            has_stopped(checkpoint, TRAIN)
        else:
            check_sequences(checkpoint, json.dumps({"sequences": 4}))
