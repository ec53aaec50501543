"""Names that other tools give to tensors of adapters, and what to do about each."""

import re
from collections.abc import Iterable

_UNWRAP = "save the model inside of the wrapper, or write the names without {}"
_FORMS = (
    (r"lora_embedding_", "adapts an embedding",
     "train it with target_modules of linears alone: all-linear, or names without the embeddings"),
    (r"\b_orig_mod\.", "is of a compiled model", _UNWRAP.format("_orig_mod.")),
    (r"\b_fsdp_wrapped_module\.", "is of a model that FSDP wraps", _UNWRAP.format("_fsdp_wrapped_module.")),
    (r"\b_checkpoint_wrapped_module\.", "is of a model with activation checkpointing",
     _UNWRAP.format("_checkpoint_wrapped_module.")),
    (r"^module\.", "is of a model that DDP or DeepSpeed wraps", _UNWRAP.format("module. before it")),
    (r"^(base_model\.model\.){2}", "is of a model that was wrapped twice by PEFT",
     "write the names with base_model.model. once"),
    (r"\.(modules_to_save|original_module)\.", "is a module that was trained as a whole",
     "train with modules_to_save=None"),
    (r"\.lora_[AB]\.\d+\.|\.(tp_)?rank_?\d+\.", "is one rank's part of a tensor",
     "put the parts of all ranks together before you save it"),
    (r"\.lora_[AB]\.bias$", "is a bias", "train with lora_bias=False"),
    (r"\.lora_(A|B|magnitude_vector)\.(?!weight$)\w+(\.weight)?$", "has the name of PEFT's adapter in it",
     "save it with save_pretrained, or write the names as lora_A.weight"),
    (r"lora_(unet|te\d?|transformer)_|\.(lora_(up|down)|lora\.(up|down)|alpha|hada_\w+|lokr_\w+)(\.weight)?$",
     "is of an adapter of kohya or diffusers, which are for models of images",
     "give an adapter of a language model"),
    (r"\.lora_[ab](\.weight)?$", "is named as mlx and torchtune do",
     "convert it to PEFT's form, with base_model.model.<module>.lora_A.weight (rank, in) and …lora_B.weight"),
    (r"\.adapter\.linear_(in|out)\.", "is named as Megatron-Bridge and NeMo do",
     "export it to Hugging Face's form with Megatron-Bridge"),
    (r"^(?!base_model\.model\.).*\.lora_[AB]\.weight$", "lacks PEFT's prefix base_model.model.",
     "write it before each name, or save it with peft's save_pretrained"),
    (r"^(?!.*lora).*\.(weight|bias)$", "is a weight of a model and none of an adapter",
     "give a whole model as model.path; of a PEFT model save_pretrained saves the adapter alone"),
)  # fmt: skip
_PEFT = "save it with peft's save_pretrained"


def form_of(name: str) -> tuple[str, str]:
    """Return what kind of name a tensor has that lorad does not read, and what to do about it."""
    for pattern, kind, hint in _FORMS:
        if re.search(pattern, name):
            return kind, hint
    return "is no LoRA weight (base_model.model.<module>.lora_A.weight or …lora_B.weight)", _PEFT


def advice_for(module: str, linears: Iterable[str]) -> str:
    """Say which of the base's linears, which are named, a module may be that the base does not have."""
    for pattern, kind, hint in _FORMS[1:6]:
        if re.search(pattern, f"base_model.model.{module}"):
            return f"its name {kind}: {hint}"
    tail = module[max(module.find("layers."), 0) :]
    if like := [name for name in linears if f".{name}".endswith(f".{tail}")]:
        return f"the base calls it {like[0]}: write its names so, or train it on the model that is served"
    return "was it made for another base?"
