"""No text or structure of a job file, and no model config in it, ends in an untyped error of the core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fuzzing import KEYS, TEXTS, VALUES, bounded, typed_errors
from veomni_core.jobs.jobfile import load_yaml, parse_yaml
from veomni_transformers.jobs.assignments import assigned, read_assignments
from veomni_transformers.jobs.job_model import model_section_of
from veomni_transformers.jobs.model_config import load_model_config

# Pieces of YAML that its readers stumble over: tags, merges, anchors, dates, complex keys.
PIECES = st.sampled_from(
    [
        *(
            "a: 1\n",
            "a: 2\n",
            "- b\n",
            "? [a, b]\n: c\n",
            "? {a: b}\n: c\n",
            "<<: *a\n",
            "<<: 3\n",
            "x: &a {b: 1}\n",
            "*a",
        ),
        *("!!map x", "!!map [a]", "!!int x\n", "!!float x\n", "!!bool x\n", "!!timestamp x\n", "!!binary é\n"),
        *(
            "!!set [a]",
            "!!omap [a]",
            "!!pairs {a: b}",
            "!!python/name:os.system\n",
            "!!python/object/apply:os.abort []\n",
        ),
        *(
            "2024-13-45\n",
            "1e5000\n",
            "0x" + "f" * 4000 + "\n",
            "9" * 5000 + "\n",
            "&a [*a]\n",
            "? &b {? *b : 1}\n: 1\n",
        ),
        *(
            "[" * 5,
            "{" * 5,
            "]",
            "}",
            ": ",
            "'",
            '"\\ud800"\n',
            "|\n x\n",
            "%YAML 9.9\n---\n",
            "---\n",
            "=\n",
            "\t",
            "\0",
        ),
    ]
)
YAML_TEXTS = st.lists(PIECES | st.text(max_size=6), max_size=6).map("".join)
MODEL_KEYS = st.sampled_from(["config", "config_path", "weights", "path", "dtype", "ops_implementation", "x"])
JOBS = st.fixed_dictionaries({"model": st.dictionaries(MODEL_KEYS | KEYS, VALUES, max_size=4) | VALUES}) | VALUES
CONFIG_KEYS = st.sampled_from(
    [
        *("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act", "rope_parameters"),
        *("vocab_size", "pad_token_id", "auto_map", "architectures", "torch_dtype", "dtype", "layer_types", "head_dim"),
    ]
)
MODEL_TYPES = st.sampled_from(["llama", "qwen3_moe", "gpt2"]) | VALUES
MODEL_CONFIGS = st.builds(
    lambda kind, rest: {"model_type": kind, **rest},
    MODEL_TYPES,
    st.dictionaries(CONFIG_KEYS | KEYS, VALUES, max_size=3),
)


@bounded(400)
@given(YAML_TEXTS)
def test_yaml_is_read_or_refused(text: str) -> None:
    with typed_errors():
        repr(parse_yaml(text))


@bounded(60)
@given(st.binary(max_size=40) | YAML_TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_the_bytes_of_a_job_file_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    job = tmp_path / "job.yaml"
    job.write_bytes(content)
    with typed_errors():
        load_yaml(job)


@bounded(250)
@given(JOBS)
def test_a_job_s_model_is_read_or_refused(tmp_path: Path, job: Any) -> None:
    if isinstance(job, dict):
        with typed_errors():
            model_section_of(job, "job.yaml", tmp_path)


@bounded(120)
@given(
    st.lists(TEXTS | st.builds("{}={}".format, st.sampled_from(["model", "model.config.x", "a..b", "."]), YAML_TEXTS))
)
def test_assignments_are_made_or_refused(texts: list[str]) -> None:
    with typed_errors():
        assigned({"model": {"config": "x"}}, read_assignments(texts))


@bounded(150)
@given(MODEL_CONFIGS)
def test_a_model_s_config_is_made_or_refused(config: Any) -> None:
    with typed_errors():
        load_model_config(config)


@bounded(100)
@given(st.binary(max_size=30) | st.sampled_from([b"[" * 100_000, b"9" * 5000, b'{"model_type": "llama", "a": 1e999}']))
def test_a_file_with_a_model_s_config_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with typed_errors():
        load_model_config(file)
