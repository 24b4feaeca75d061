"""Log-probabilities from a model's own logits, and the config that binds nothing else."""

from __future__ import annotations

import torch

FIELD = "token_logprobs_implementation"
ALONE = {"preset": "eager", FIELD: "chunk_logprobs"}


def own_logprobs(model, ids, labels, temperature=1.0, **inputs):
    """Log-probabilities and entropies of shifted ``labels`` from the model's own logits, in torch's words."""
    logits = model(ids, use_cache=False, **inputs).logits[:, : labels.shape[1]].float() / temperature
    counts = labels != -100
    logprobs = torch.log_softmax(logits, dim=-1)
    picked = logprobs.gather(2, labels.clamp_min(0).unsqueeze(2)).squeeze(2)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return torch.where(counts, picked, 0.0), torch.where(counts, entropy, 0.0)
