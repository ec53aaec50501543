"""Opening what transformers computes: its config, its class, and what lorad leaves out of it."""

from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from lorad.errors import SpecError
from lorad.models.facts import is_left_out


def read_config(directory: Path) -> Any:
    """Read config.json. Raises SpecError for what transformers does not know, and for quantized weights."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        hint = (
            "give the directory of a model that transformers supports without custom code; code of "
            "models is never run"
        )
        raise SpecError(f"{directory}: {in_a_line(error)}", key="model.path", hint=hint) from error
    if getattr(config, "quantization_config", None):
        hint = "give the model in bfloat16 or float32"
        raise SpecError(f"{directory}: quantized weights cannot be trained on", key="model.path", hint=hint)
    return config


def auto_class(config: Any) -> Any:
    """Return what makes the model of a config: some language models are there only as a part of one that
    sees images.
    """
    kind = type(config)
    sees_only = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if sees_only else AutoModelForCausalLM


def without_towers(model: Any) -> Any:
    """Take the towers for images and sound, and layers for later tokens, out of a model; returns it."""
    for parent in (model, model.base_model):
        for name, _ in [*parent.named_children()]:
            if is_left_out(name, 0):
                setattr(parent, name, None)
    return model


def in_a_line(error: BaseException) -> str:
    """Return what an error says, without the table of all that transformers knows."""
    return " ".join(str(error).partition("Model type should be one of")[0].split())[:300]
