"""A model as a directory: where it is, what it is, and whether it is whole. Imports no torch."""

import json
import re
from pathlib import Path
from typing import Any

from lorad.adapters.peft import PICKLES
from lorad.adapters.targets import HEAD
from lorad.bounds import CONFIG_BYTES, INDEX_BYTES
from lorad.box.models import MODELS
from lorad.errors import SpecError
from lorad.files import expanded, read_file
from lorad.models.config import ExpertsConfig, ModelConfig, groups_of, modules_in, parse_config, shapes_in
from lorad.spec.numbers import BUILTIN_MODELS, HUB_ID

BUILTIN = {
    name: Path(__file__).parent / name.removeprefix("builtin:").replace("-", "_") for name in BUILTIN_MODELS
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]  # other forms of the same weights
_ANSWER_WITHIN = 10  # seconds
_GIVE = "give a Hugging Face model directory"


def resolve(path: str, *, any_architecture: bool = False) -> Path:
    """Return the directory of `builtin:tiny`, of a local Hugging Face model, or of a hub id.

    A hub id is `org/name` or `org/name@revision` (a branch, tag or commit). Its snapshot is taken from the
    hub cache as it is there, without asking the network: a base does not change under a run because a branch
    moved. What is not in the cache is downloaded, the weights last. With `any_architecture` also what the
    builtin backend does not compute is.

    Raises: SpecError when there is none, or when a hub id can be neither found in the cache nor downloaded.
    """
    if path.startswith("builtin:"):
        if path not in BUILTIN:
            raise SpecError(
                f"no builtin model {path}", key="model.path", hint=f"there is {', '.join(BUILTIN)}"
            )
        return BUILTIN[path]
    local = expanded(path)
    if local.is_dir():
        return local.resolve()
    if not re.fullmatch(HUB_ID, path) or local.exists():
        hint = f"`lorad models get {path}` downloads it" if path in MODELS else _GIVE
        raise SpecError(f"{path} is not a directory", key="model.path", hint=hint)
    name, _, revision = path.partition("@")
    commit = revision or None
    if (snapshot := cached(name, commit)) is not None:
        return snapshot
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    try:
        # the others retry, or wait without end
        HfApi().model_info(name, revision=commit, timeout=_ANSWER_WITHIN)
        config = read_json(Path(hf_hub_download(name, "config.json", revision=commit)))
        if not any_architecture:
            parse_config(config, f"{path}/config.json")
        return Path(
            snapshot_download(
                name, revision=commit, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES
            )
        )
    except SpecError:
        raise
    except Exception as error:  # each version of the hub's client, and of its transports, has its own kinds
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise SpecError(
            f"{path} is no directory, is not whole in the hub cache, and could not be downloaded: {reason}",
            key="model.path",
            hint="check the name and the network (HF_TOKEN for gated models); without network, give a local "
            f"directory, or fill the cache where there is one: hf download {name}",
        ) from error


def cached(name: str, revision: str | None) -> Path | None:
    """Return the cached snapshot, if whatever lorad reads of it is there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    try:
        weight_files(directory)
    except SpecError:
        return None
    return directory if (directory / "tokenizer.json").is_file() else None


def read_config(directory: Path) -> ModelConfig:
    """Return the config of a complete directory: `config.json` is known and every weight file that it needs
    is there.

    Raises: SpecError that names the missing or unsupported part.
    """
    path = directory / "config.json"
    config = parse_config(read_json(path), str(path))
    weight_files(directory)
    return config


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of the model, in a stable order; a single file wins over shards, as in
    transformers.

    Raises: SpecError when one is missing.
    """
    index = directory / INDEX
    sharded = index.exists() and not (directory / _SINGLE).exists()
    names = [_SINGLE]
    if sharded:
        weight_map = read_json(index, INDEX_BYTES).get("weight_map")
        files = weight_map.values() if isinstance(weight_map, dict) else [""]
        names = sorted(set(files)) if all(isinstance(file, str) for file in files) else [""]
        for name in names:
            if Path(name).name != name or name in ("", ".."):
                raise SpecError(
                    f"{index}: weight_map names {name!r}, no file beside it", hint="download the model again"
                )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
        pickled = f" (there is {pickles[0]}, which is never read: it could run code)" if pickles else ""
        raise SpecError(
            f"{directory}: missing {', '.join(missing[:5]) or 'every weight file'}{pickled}",
            hint="complete the download; only safetensors weights are read (never .bin or .pt)",
        )
    return [directory / name for name in names]


def indexed(directory: Path) -> dict[str, list[str]]:
    """Return the tensors that the index says are in each of `weight_files`; nothing where there is no index.

    Raises SpecError.
    """
    tensors: dict[str, list[str]] = {path.name: [] for path in weight_files(directory)}
    if tensors.keys() != {_SINGLE}:
        for name, file in read_json(directory / INDEX, INDEX_BYTES)["weight_map"].items():
            tensors[file].append(name)
    return tensors


def read_json(path: Path, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a model, of at most so many bytes. Raises SpecError."""
    try:
        data = json.loads(read_file(path, most))
    except FileNotFoundError as error:
        raise SpecError(f"{path.parent}: missing {path.name}", hint=_GIVE) from error
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"{path}: not readable: {why}", hint="download the model again") from error
    if not isinstance(data, dict):
        raise SpecError(f"{path}: not a JSON object", hint="download the model again")
    return data


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every linear by its Hugging Face module name, layer by layer; `lm_head` only when
    it is untied.
    """
    shapes = {
        f"{config.prefix}layers.{layer}.{module}": shape
        for layer in range(config.num_hidden_layers)
        for group in groups_of(config, layer)
        for module, shape in zip(
            modules_in(config, layer, group), shapes_in(config, layer, group), strict=True
        )
    }
    return shapes if config.tie_word_embeddings else shapes | {HEAD: (config.vocab_size, config.hidden_size)}


def embeddings_of(config: ModelConfig) -> str:
    """Return the name of the embeddings in a checkpoint."""
    return f"{config.prefix}embed_tokens.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that the forward reads, by its name in a checkpoint."""
    is_fused = config.experts is not None and config.experts.is_fused
    shapes: dict[str, tuple[int, ...]] = {
        embeddings_of(config): (config.vocab_size, config.hidden_size),
        f"{config.prefix}norm.weight": (config.hidden_size,),
    }
    for name, shape in linear_shapes(config).items():
        if not (is_fused and ".experts." in name):
            shapes[f"{name}.weight"] = shape
    hidden = config.hidden_size
    dim = config.head_dim
    heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
    biased = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
    for layer in range(config.num_hidden_layers):
        beside: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for group in groups_of(config, layer):
            if biased.get(group):
                modules = zip(modules_in(config, layer, group), shapes_in(config, layer, group), strict=True)
                beside |= {f"{module}.bias": (rows,) for module, (rows, _) in modules}
        delta = config.delta
        if delta is not None and layer in delta.layers:
            beside |= {
                "linear_attn.conv1d.weight": (delta.mixed, 1, delta.kernel),
                "linear_attn.A_log": (delta.value_heads,),
                "linear_attn.dt_bias": (delta.value_heads,),
                "linear_attn.norm.weight": (delta.value_dim,),
            }
        for name, count in heads.items() if config.qk_norm and not config.has_delta(layer) else ():
            beside[f"self_attn.{name}.weight"] = (count * dim if config.norms_all_heads else dim,)
        if config.has_sinks:
            beside["self_attn.sinks"] = (config.num_attention_heads,)
        if config.experts is not None and config.has_experts(layer):
            beside |= _of_experts(config.experts, hidden)
        shapes |= {f"{config.prefix}layers.{layer}.{name}": shape for name, shape in beside.items()}
    return shapes


def _of_experts(experts: ExpertsConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    block = experts.block
    count = experts.count
    width = experts.width
    shared = experts.shared
    if experts.is_fused:
        return {
            f"{block}.router.weight": (count, hidden),
            f"{block}.router.bias": (count,),
            f"{block}.experts.gate_up_proj": (count, hidden, 2 * width),
            f"{block}.experts.down_proj": (count, width, hidden),
            f"{block}.experts.gate_up_proj_bias": (count, 2 * width),
            f"{block}.experts.down_proj_bias": (count, hidden),
        }
    shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (count, hidden)}
    if experts.is_sigmoid:
        shapes[f"{block}.gate.e_score_correction_bias"] = (count,)
    if shared is not None and shared.is_gated:
        shapes[f"{shared.name}_gate.weight"] = (1, hidden)
    return shapes
