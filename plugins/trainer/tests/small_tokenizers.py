"""Real tokenizers, small enough to be made in a test, and chat templates of the kinds that models come with."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = "the quick brown fox jumps over the lazy dog. What is the weather? It is sunny today, they say. " * 20
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Every turn is rendered alone, as ChatML does.
CHATML = """\
{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Says itself what the assistant's words are: their end token too, and not the line break after it.
MARKED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}"""
# Leaves thoughts out of all turns but the last, so that a turn is rendered otherwise once it is past.
FORGETFUL = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}
{%- else %}{{ message.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Takes turns of user and assistant in alternation alone.
STRICT = """\
{%- for message in messages %}
{%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '[' + message.role + ']' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""


def byte_level(template: str | None = CHATML, trim_offsets: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as GPT-2's, Qwen's and Llama 3's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS], trainer)
    return _wrapped(backend, template)


def sentence_piece(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A BPE tokenizer over words that begin with a visible space, as Llama 2's and Gemma's."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator([WORDS], trainer)
    return _wrapped(backend, template)


def saved(tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """The folder in which the tokenizer now is."""
    tokenizer.save_pretrained(folder)
    return str(folder)


def _wrapped(backend: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
