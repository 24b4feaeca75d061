"""Refuses values of a model's config that transformers takes, and with which no model can be built or run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from veomni_core.errors import ConfigError, did_you_mean

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_AT_LEAST = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "vocab_size"), 1),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok"), 1),
    **dict.fromkeys(("decoder_sparse_step", "max_position_embeddings"), 1),
    **dict.fromkeys(_EXPERTS, 0),  # 0: a dense model
}
_NOT_NEGATIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
_PROBABILITIES = ("attention_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_ROPE = ("rope_parameters", "rope_scaling")
_ROPE_NAMES = ("rope_type", "type")
# What a rope config may set of the default rotary embedding, which needs no rope_type.
_OF_DEFAULT_ROPE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "mrope_section")


def refuse_values(written: Mapping[str, Any], config_class: type[PretrainedConfig], prefix: str) -> None:
    """Raise one error for all written values that are out of range. A class's own defaults are always in it.

    Args:
        written: the config's keys, as its author wrote them.
        config_class: the class that the config will be of.
        prefix: what stands before a key in messages, e.g. ``model.config.``.

    Raises:
        ConfigError: ``written`` has such values; the message names each key, and what it may be.
    """
    problems = {
        name: problem
        for check in (_out_of_range, _unknown_activations, _half_written_rope)
        for name, problem in check(written)
    }
    if problems:
        default = _defaults(config_class)
        problems = {name: problem for name, problem in problems.items() if default(name) != written[name]}
    if problems:
        raise ConfigError("\n".join(f"{prefix}{problem}" for problem in problems.values()))


def refuse_unfit_pairs(config: PretrainedConfig, written: Mapping[str, Any], prefix: str) -> None:
    """Raise if two sizes of ``config`` don't fit each other, at least one of which was written.

    Raises:
        ConfigError: query heads that can't be shared out evenly, or more chosen experts than there are.
    """

    def value_of(name: str) -> int:
        value = written[name] if name in written else vars(config).get(name)
        return value if type(value) is int else 0

    heads, shared, chosen = map(value_of, ("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"))
    if shared and heads % shared and {"num_attention_heads", "num_key_value_heads"} & {*written}:
        raise ConfigError(
            f"{prefix}num_key_value_heads: {shared} does not divide num_attention_heads: {heads}, and each of them "
            f"serves equally many query heads. Write one of {', '.join(str(n) for n in _divisors(heads))}"
        )
    for name in _EXPERTS:
        if 0 < (experts := value_of(name)) < chosen and {name, "num_experts_per_tok"} & {*written}:
            raise ConfigError(
                f"{prefix}num_experts_per_tok: a token can't choose {chosen} of {name}: {experts}. Write at most "
                f"{experts}"
            )


def _out_of_range(written: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, least in _AT_LEAST.items():
        value = written.get(name)
        # Some models take a list, with a value for each layer, or None.
        if isinstance(value, (str, float, bool)) or (isinstance(value, int) and value < least):
            yield name, f"{name}: must be a whole number of at least {least}, got {value!r}{_hint(value)}"
    for names, most, words in ((_NOT_NEGATIVE, float("inf"), "of at least 0"), (_PROBABILITIES, 1, "from 0 to 1")):
        for name in names:
            value = written.get(name)
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= most):
                yield name, f"{name}: must be a number {words}, got {value!r}{_hint(value)}"


def _hint(value: Any) -> str:
    """YAML 1.1 reads ``1e-6`` as text."""
    try:
        is_number = isinstance(value, str) and bool(float(value))
    except ValueError:
        is_number = False
    return ", which is text; write a number without quotes, with a point if it has an exponent (1.0e-6)" * is_number


def _unknown_activations(written: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _ACTIVATIONS:
        value = written.get(name)
        if isinstance(value, str) and value not in ACT2FN:
            yield name, f"{name}: {value!r} is unknown. {did_you_mean(value, ACT2FN)}"


def _half_written_rope(written: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _ROPE:
        rope = written.get(name)
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            continue  # left out, or one for each type of layers
        yield from ((name, f"{name}.{problem}") for problem in _not_positive_numbers(rope))
        ignored = [key for key in rope if key not in _OF_DEFAULT_ROPE]
        if ignored and not any(rope.get(key) for key in _ROPE_NAMES):
            yield (
                name,
                f"{name}: without rope_type, transformers ignores {', '.join(map(str, ignored))}. Add rope_type (e.g. "
                "linear, dynamic, yarn, llama3), or remove it",
            )
    yield from (("rope_theta", problem) for problem in _not_positive_numbers(written))


def _not_positive_numbers(rope: Mapping[str, Any]) -> Iterator[str]:
    for key in ("rope_theta", "factor"):
        value = rope.get(key)
        if isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and value <= 0):
            yield f"{key}: must be a number above 0, got {value!r}{_hint(value)}"


def _defaults(config_class: type[PretrainedConfig]) -> Callable[[str], Any]:
    try:
        values = vars(config_class())
    except Exception:  # a class without defaults
        values = {}
    return values.get


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
