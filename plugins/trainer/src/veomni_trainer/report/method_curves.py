"""What a method measures beside its loss: curves, and what the progress shows, by their names in a row of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator

from veomni_trainer.output.metrics import Row

_CURVES = {
    "entropy": ("Entropy", "nats per token"),
    "mean_token_accuracy": ("Token accuracy", "share of the learned tokens"),
    "rewards/accuracies": ("Pairs the right way round", "share of the pairs"),
    "rewards/margins": ("Reward margin", "chosen over rejected"),
    "accuracy": ("Accuracy", "share of the texts or pairs"),
    "margin": ("Margin", "score of the chosen over that of the rejected"),
    "mean_reward": ("Mean score", "over the chosen and the rejected"),
    "nll_loss": ("Loss of the chosen", "per token"),
    "log_odds_chosen": ("Log odds ratio", "chosen over rejected"),
    "rewards/chosen": ("Reward of the chosen", "beta times the log-ratio to the reference"),
    "rewards/rejected": ("Reward of the rejected", "beta times the log-ratio to the reference"),
    "logps/chosen": ("Log-probability of the chosen", "sum over its tokens"),
    "logps/rejected": ("Log-probability of the rejected", "sum over its tokens"),
    "reward": ("Reward", "mean over the completions"),
    "reward_std": ("Reward spread", "standard deviation over the completions"),
    "kl": ("Divergence from the reference", "per token"),
    "completions/mean_length": ("Completion length", "tokens, on average"),
    "completions/clipped_ratio": ("Completions that were cut off", "share"),
    "rollout_difference/mean": ("Training beside the rollout", "log-probabilities, on average"),
    "rollout_difference/largest": ("Training beside the rollout, largest", "log-probabilities"),
    "clip_ratio/region_mean": ("Clipped ratios", "share of the tokens"),
}
# The names under which the progress shows them.
_SHOWN = {
    "mean_token_accuracy": "token accuracy",
    "reward": "reward",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "accuracy": "accuracy",
    "margin": "margin",
    "kl": "KL",
}
_REWARD = re.compile(r"rewards/(.+)/mean")


def shown(row: Row) -> str:
    """The figures of ``row`` that say how its method does.

    Example:
        >>> shown({"loss": 0.1, "reward": 0.5, "kl": 0.01})
        'reward 0.5  KL 0.01'
    """
    return "  ".join(f"{title} {row[name]:.3g}" for name, title in _SHOWN.items() if name in row)


def curves_of(rows: list[Row]) -> Iterator[tuple[str, str, str]]:
    """The name, title and note of each curve in ``rows``, in a fixed order; then one for each of several rewards."""
    names = dict.fromkeys(name for row in rows for name in row)
    for name, (title, note) in _CURVES.items():
        if name in names:
            yield name, title, note
    judged = [(name, found[1]) for name in names if (found := _REWARD.fullmatch(name))]
    for name, function in judged if len(judged) > 1 else ():
        yield name, f"Reward of {function}", "mean over the completions"
