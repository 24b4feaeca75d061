"""Names that keys of a job have elsewhere, as in transformers' ``TrainingArguments``, and usual abbreviations."""

from __future__ import annotations

from collections.abc import Mapping

from veomni_transformers.jobs.job_model import SYNONYMS as OF_MODELS

_ELSEWHERE = {  # by key; of two keys for one name, the better one comes first
    "files": "dataset dataset_name train_file train_files",
    "tokenizer": "tokenizer_name tokenizer_path",
    "end_of_document": "eos_token",
    "sequence_length": "block_size context_length cutoff_len max_length max_seq_len max_seq_length seq_len seqlen",
    "validation_fraction": "eval_split test_size val_split",
    "output_dir": "out_dir output",
    "epochs": "num_epochs num_train_epochs",
    "steps": "epochs iterations max_iters max_steps num_epochs num_steps num_train_epochs",
    "batch_size": "bs bsz global_batch_size mbs micro_batch_size per_device_batch_size per_device_train_batch_size",
    "gradient_accumulation": "global_batch_size accum grad_accum gradient_accumulation_steps",
    "learning_rate": "lr",
    "schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler",
    "warmup": "num_warmup_steps warmup_ratio warmup_steps",
    "optimizer": "optim",
    "weight_decay": "wd",
    "max_grad_norm": "clip_grad grad_clip gradient_clipping",
    "seed": "data_seed random_seed",
    "gradient_checkpointing": "activation_checkpointing grad_checkpointing recompute",
    "bf16": "amp mixed_precision",
    "device": "use_cpu",
    "validate_every": "eval_steps",
    "log_every": "logging_steps",
    "save_every": "save_steps",
    "keep_checkpoints": "save_total_limit",
    "timeout": "ddp_timeout",
    "cp_size": "cp context_parallel_size ring_size",
    "sp_size": "sequence_parallel_size sp ulysses_size",
    "tp_size": "tensor_parallel_size",
    "ep_size": "expert_parallel_size",
    "fsdp_size": "data_parallel_size",
}
_NAMES = dict.fromkeys(name for names in _ELSEWHERE.values() for name in names.split())
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **OF_MODELS,
    **{name: tuple(key for key, names in _ELSEWHERE.items() if name in names.split()) for name in _NAMES},
}
