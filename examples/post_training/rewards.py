"""Rewards of the GRPO job. Each gets the prompts, the completions and the data's other columns, a list each."""


def contains_answer(completions, answer, **columns):
    """The part of the answer's letters that the completion has, so that there is something to climb from the start."""
    said = [completion[0]["content"].lower() for completion in completions]
    letters = [set(right.lower()) for right in answer]
    return [len(wanted & set(text)) / len(wanted) for text, wanted in zip(said, letters, strict=True)]


def brevity(completions, **columns):
    """1 for nothing, 0 for 16 characters or more."""
    return [max(0.0, 1 - len(completion[0]["content"]) / 16) for completion in completions]
