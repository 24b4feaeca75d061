"""Which class of transformers a config's model is built as: the whole model, and a part of it only where it must be."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto import modeling_auto

from veomni_core.errors import ConfigError
from veomni_transformers.plugin_models import model_class_of

# Tables of transformers: of models that write text, those of images, audio or video first, since some types have a text
# decoder in the last one; and of other models. Not every version has all.
_WRITE_TEXT, _OTHERS = (
    [getattr(modeling_auto, f"MODEL_{name}MAPPING_NAMES", {}) for name in names]
    for names in (
        ("FOR_MULTIMODAL_LM_", "FOR_IMAGE_TEXT_TO_TEXT_", "FOR_SPEECH_SEQ_2_SEQ_", "FOR_CAUSAL_LM_"),
        ("FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_TEXT_TO_WAVEFORM_", "FOR_MASKED_LM_", "FOR_SEQUENCE_CLASSIFICATION_", ""),
    )
)


def class_and_config(config: Any) -> tuple[Any, Any]:
    """The class that a model of ``config`` is built as, and the part of ``config`` that is this class's own.

    The first of ``config.architectures`` that transformers has, else the class of the whole model by transformers'
    mappings: for a type with images, audio or video that one, and not its text decoder. A class that can't be called,
    such as that of Qwen2.5-Omni, stands for the part of it that reads inputs and writes text: its thinker.

    Returns:
        A class of transformers or of a plugin, and a config of its kind; ``AutoModelForCausalLM`` for models that come
        with code.

    Raises:
        ConfigError: transformers has no model of this type that writes text.

    Example:
        >>> from transformers import Qwen3_5Config
        >>> class_and_config(Qwen3_5Config())[0].__name__
        'Qwen3_5ForConditionalGeneration'
        >>> kind, its_config = class_and_config(Qwen3_5Config(architectures=["Qwen3_5ForCausalLM"]))
        >>> kind.__name__, its_config.model_type
        ('Qwen3_5ForCausalLM', 'qwen3_5_text')
    """
    if not type(config).__module__.startswith("transformers.") and (own := model_class_of(config)):
        return own, config
    written = config.architectures or ()
    kind = _named([written] if isinstance(written, str) else written)
    if kind is None and not type(config).__module__.startswith("transformers."):
        return AutoModelForCausalLM, config
    kind = kind or _named(each.get(config.model_type) for each in _WRITE_TEXT)
    if kind is None:
        raise ConfigError(_why_none(config.model_type))
    if kind.forward is nn.Module.forward:
        return _part_that_writes_text(kind, config)
    return kind, _own_part(kind, config)


def _named(names: Any) -> Any:
    return next((getattr(transformers, name) for name in names if name and hasattr(transformers, name)), None)


def _own_part(kind: Any, config: Any) -> Any:
    """``config``, or that of the text decoder in it, if ``kind`` is the decoder's class."""
    text = config.get_text_config()
    if text is config or isinstance(config, kind.config_class or object):
        return config
    return text if isinstance(text, kind.config_class) else config


def _part_that_writes_text(kind: Any, config: Any) -> tuple[Any, Any]:
    for name in config.sub_configs:
        part = getattr(config, name, None)
        found = part and _named(each.get(part.model_type) for each in _WRITE_TEXT)
        if found is not None and found.forward is not nn.Module.forward:
            return found, part
    raise ConfigError(f"{kind.__name__} has no forward, and no part of it that writes text. {_remedy(())}")


def _why_none(model_type: str) -> str:
    others = dict.fromkeys(each[model_type] for each in _OTHERS if model_type in each)
    names = [each for other in others for each in (other if isinstance(other, tuple) else (other,))]
    return (
        f"transformers has no model of the type {model_type} that writes text, alone or about images, audio or video. "
        f"{_remedy(names)}"
    )


def _remedy(names: Any) -> str:
    if names:
        return f"For another class, write its name into the config (model.config), as in architectures: [{names[0]}]"
    return "Write the class into the config (model.config), as in architectures: [CLASS], or name another model"
