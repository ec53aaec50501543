"""What can be known of any Hugging Face model without loading it: config.json and the headers of its weight
files.

The builtin backend computes few architectures, and says so; other backends take more. Imports no torch.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lorad.adapters.targets import HEAD, leaf
from lorad.errors import SpecError
from lorad.files import open_file, refuse_sparse
from lorad.models.config import ModelConfig, parse_config
from lorad.models.directory import (
    BYTES,
    embeddings_of,
    linear_shapes,
    read_json,
    tensor_shapes,
    weight_files,
)
from lorad.protocol.pool_setup import Quantize
from lorad.routes import RouteShape

NF4_BLOCK = 64  # numbers of a linear that share a scale
_Shapes = dict[str, tuple[int, int]]

_HEADER_LIMIT = 100 << 20  # bytes, as the safetensors library has it
_CHUNK = 16 << 20
_FLOATS = ("F64", "F32", "BF16", "F16")  # of tensors that are numbers as they stand
_BELONGS = "the weights and config.json belong to different models"
_DERIVED = "rotary_emb.inv_freq"  # older Llama checkpoints hold what follows from config.json
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_EMBEDDINGS = re.compile(r"embed|(^|\.)(wte|wpe)$")
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.|$)")
_EXPERT = re.compile(r"(^|\.)experts(\.|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,4})\.")
_LAYERS = ("num_hidden_layers", "n_layer")
_KV_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_PLACEHOLDERS = {
    f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "experts_per_token")
_OTHER_SENSES = re.compile(
    r"(^|\.)(visual|(embed_)?vision\w*|(embed_)?audio\w*|mm_projector|multi_modal_projector)(\.|$)"
)
_NO_ATTENTION = {"linear_attention", "mamba", "mlp", "moe"}  # kinds of layers without keys and values


class TensorPlace(NamedTuple):
    """Where a tensor lies: from byte `start` to `end` of its weight file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model. What config.json does not say is 0 or "".

    Attributes:
        dtype: The dtype of the checkpoint.
        parameters: How many numbers all tensors have.
        active: How many of them a token meets; fewer than all where experts take turns.
        linears: The (out, in) of what an adapter may target, by logical name.
        experts: The same of linears whose inputs depend on a router; (0, 0) where a tensor holds several.
        cached: How many numbers the keys and values of one token are, in all layers.
        expert_count: How many experts a layer has.
        states: How many bytes the states of a sequence are at most, in all layers.
        recurred: How many numbers of a token a gated delta net reads and writes in float32.
        routes: The shape of the routes of tokens; None where the model is no mixture, or config.json does
            not say how many experts a token has.
        placeholders: The ids of tokens that stand for images and sounds in a text.
        rotates_in_part: Whether a part of each head has no positions.
    """

    vocab: int
    max_positions: int
    dtype: str
    parameters: int
    active: int
    linears: _Shapes
    experts: _Shapes
    cached: int
    layers: int
    kv_heads: int
    expert_count: int
    experts_per_token: int
    model_type: str
    hidden_size: int
    routes: RouteShape | None = None
    states: int = 0
    recurred: int = 0
    placeholders: frozenset[int] = frozenset()
    rotates_in_part: bool = False

    def bytes(self, dtype: str = "auto", quantize: Quantize | None = None) -> int:
        """Return the bytes of the loaded weights, with linears packed in the format `quantize`; `auto` is the
        checkpoint's own dtype. Raises SpecError for an unknown dtype.
        """
        name = self.dtype if dtype == "auto" else dtype
        if name not in BYTES:
            raise SpecError(
                f"{name} is not supported", key="model.dtype", hint=f"use one of {', '.join(BYTES)}"
            )
        packed = {} if quantize is None else {**self.linears, **self.experts}
        shapes = [shape for name, shape in packed.items() if name != HEAD]
        numbers = sum(out * inputs for out, inputs in shapes)
        rows = sum(out for out, _ in shapes)
        bits = numbers // 2 + 4 * numbers // NF4_BLOCK if quantize == "nf4" else numbers + 4 * rows
        return (self.parameters - numbers) * BYTES[name] + bits


def read_facts(directory: Path) -> ModelFacts:
    """Read the facts of a complete directory, whatever its architecture.

    Raises: SpecError that names the missing part, and for quantized weights, which nothing trains on.
    """
    data = read_json(directory / "config.json")
    weight_files(directory)
    config = known_config(directory)
    if config is None:
        return _of_headers(data, directory)
    model_type = str(data.get("model_type") or "")
    shapes = linear_shapes(config)
    mixture = config.experts
    delta = config.delta
    return ModelFacts(
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        dtype=config.dtype,
        parameters=config.num_parameters,
        active=config.num_active_parameters,
        linears={name: shape for name, shape in shapes.items() if not _EXPERT.search(name)},
        experts={name: shape for name, shape in shapes.items() if _EXPERT.search(name)},
        cached=2 * len(config.attentions) * config.num_key_value_heads * config.head_dim,
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        expert_count=0 if mixture is None else mixture.count,
        experts_per_token=0 if mixture is None else mixture.per_token,
        model_type=model_type,
        hidden_size=config.hidden_size,
        routes=RouteShape(config.num_hidden_layers, mixture.count, mixture.per_token) if mixture else None,
        states=delta.state_bytes(4) if delta else 0,
        recurred=delta.mixed + delta.values if delta else 0,
    )


def known_config(directory: Path) -> ModelConfig | None:
    """Return the configuration of a model that lorad computes itself; None of any other."""
    path = directory / "config.json"
    try:
        return parse_config(read_json(path), str(path))
    except SpecError:
        return None


def weights_sha256(directory: Path, quantize: Quantize | None = None) -> str:
    """Return the sha256 (hex) over the names and bytes of the weight files, and the grid that linears are
    rounded to; it is equal for every trainer and any sharding.
    """
    digest = hashlib.sha256(f"{quantize}\n".encode() if quantize else b"")
    for path in weight_files(directory):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def check_tensors(directory: Path, config: ModelConfig) -> dict[str, Path]:
    """Check, by the headers of its weight files, that a checkpoint is the model of `config`.

    Returns the file of each tensor that the forward reads. Raises SpecError as `check_whole` does, and for a
    tensor that the forward would leave out, and a second copy of tied embeddings that differs from them.
    """
    stored = check_whole(directory, config)
    head = f"{HEAD}.weight"
    copy = stored.pop(head, None) if config.tie_word_embeddings else None
    if others := sorted(stored.keys() - tensor_shapes(config).keys()):
        raise SpecError(
            f"{stored[others[0]][0]}: {len(others)} tensors have no place in the model that config.json "
            f"describes: {', '.join(others[:3])}",
            hint=_BELONGS,
        )
    embeddings = embeddings_of(config)
    if copy is not None:
        path, place = copy
        tied_path, tied = stored[embeddings]
        is_same = place[:2] == tied[:2]
        if is_same:
            with open_file(path) as left, open_file(tied_path) as right:
                left.seek(place.start)
                right.seek(tied.start)
                sizes = (min(_CHUNK, place.end - at) for at in range(place.start, place.end, _CHUNK))
                is_same = all(left.read(size) == right.read(size) for size in sizes)
        if not is_same:
            raise SpecError(
                f"{path}: {head} differs from {embeddings}, config.json ties them",
                hint="set tie_word_embeddings to false in config.json",
            )
    return {name: path for name, (path, _) in stored.items()}


def check_whole(directory: Path, config: ModelConfig) -> dict[str, tuple[Path, TensorPlace]]:
    """Check, by the headers of its weight files, that a checkpoint has all tensors of the model of `config`.

    Returns where each of its tensors is, but for what no forward reads. Raises SpecError for a missing
    tensor, one of another shape, and one of packed numbers.
    """
    stored = {
        name: place
        for name, place in stored_tensors(directory).items()
        if not name.endswith(_DERIVED) and not name.startswith(config.unread)
    }
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        if name not in stored:
            missing = len(expected.keys() - stored.keys())
            others = sorted(stored.keys() - expected.keys() - {f"{HEAD}.weight"})
            hint = (
                f"the files have {', '.join(others[:3])} instead; {_BELONGS}"
                if others
                else "complete the download"
            )
            raise SpecError(f"{directory}: no tensor {name}, and {missing} are missing in all", hint=hint)
        path, place = stored[name]
        if place.shape != shape:
            problem = f"{path}: {name} has shape {place.shape}, config.json says {shape}"
            raise SpecError(problem, hint=_BELONGS)
        if place.dtype not in _FLOATS:
            problem = f"{path}: {name} holds {place.dtype}: quantized weights cannot be trained on"
            raise SpecError(problem, hint="give the model in bfloat16")
    return stored


def stored_tensors(directory: Path) -> dict[str, tuple[Path, TensorPlace]]:
    """Return the file of each tensor of a checkpoint, and its place there.

    Raises SpecError for a tensor that two files hold: which of them counts, readers do not agree on.
    """
    stored: dict[str, tuple[Path, TensorPlace]] = {}
    for path in weight_files(directory):
        for name, place in tensor_places(path).items():
            if name in stored:
                raise SpecError(
                    f"{stored[name][0]} and {path.name} both hold {name}",
                    key="model.path",
                    hint="One of them may be of another model, or of another download: download both again, "
                    "or save the model anew with transformers' save_pretrained.",
                )
            stored[name] = (path, place)
    return stored


def refuse_unfilled(linears: Mapping[str, tuple[int, int]]) -> None:
    """Raise SpecError for a linear that blocks of nf4 do not fill."""
    for name, (out, inputs) in linears.items():
        if out * inputs % NF4_BLOCK:
            raise SpecError(
                f"nf4 has one scale for {NF4_BLOCK} numbers, which do not divide {name} [{out}, {inputs}]",
                key="model.quantize",
                hint="Use fp8, or leave it out.",
            )


def _of_headers(data: Mapping[str, Any], directory: Path) -> ModelFacts:
    where = str(directory / "config.json")
    config = {**data, **(data.get("text_config") or {})}
    if data.get("quantization_config") or config.get("quantization_config"):
        raise SpecError(f"{where}: quantized weights cannot be trained on", hint="give the model in bfloat16")
    kinds = config.get("layer_types") or config.get("layers_block_type")
    layers = _first(config, _LAYERS) or (len(kinds) if isinstance(kinds, list) else 0)
    stored = {name: place[:2] for name, (_, place) in stored_tensors(directory).items()}
    tensors = {name: tensor for name, tensor in stored.items() if not is_left_out(name, layers)}
    is_tied = bool(config.get("tie_word_embeddings", data.get("tie_word_embeddings", False)))
    matrices = {
        name: shape for name, (_, shape) in tensors.items() if name.endswith(".weight") and len(shape) == 2
    }
    modules = {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in matrices.items()}
    counts = {name: math.prod(shape) for name, (_, shape) in tensors.items()}
    own = Counter[str]()
    for dtype, shape in tensors.values():
        own[dtype] += math.prod(shape)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    dtype = dtype or _DTYPES.get(own.most_common(1)[0][0] if own else "", "")
    heads = config.get("num_attention_heads") or 1
    width = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
    kinds = kinds if isinstance(kinds, list) else ["attention"] * layers
    attentions = sum(kind not in _NO_ATTENTION for kind in kinds)
    cached = 2 * attentions * (config.get("num_key_value_heads") or heads) * width
    expert_count = _first(config, _EXPERTS)
    per_token = _first(config, _PER_TOKEN)
    in_experts = sum(count for name, count in counts.items() if _EXPERT.search(name))
    is_known = in_experts and per_token and expert_count
    idle = in_experts * (expert_count - per_token) // expert_count if is_known else 0
    rope = config.get("rope_parameters")
    rotated = {**config, **(rope if isinstance(rope, dict) else {})}.get("partial_rotary_factor") or 1
    mixtures = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    has_routes = mixtures and expert_count and per_token
    return ModelFacts(
        vocab=_integer(config, ("vocab_size",), where),
        max_positions=_integer(config, ("max_position_embeddings", "n_positions", "max_seq_len"), where),
        dtype=dtype if dtype in BYTES else "float32",
        parameters=sum(counts.values()),
        active=sum(counts.values()) - idle,
        linears=_linears(modules, is_tied, data),
        experts={
            name: modules.get(name, (0, 0))
            for name in sorted({name.removesuffix(".weight") for name in tensors if _EXPERT.search(name)})
        },
        cached=cached,
        layers=layers,
        kv_heads=_first(config, _KV_HEADS),
        expert_count=expert_count,
        experts_per_token=per_token,
        model_type=str(data.get("model_type") or ""),
        hidden_size=_first(config, _WIDTHS),
        routes=RouteShape(len(mixtures), expert_count, per_token) if has_routes else None,
        placeholders=frozenset(
            data[name] for name in data.keys() & _PLACEHOLDERS if isinstance(data[name], int)
        ),
        rotates_in_part=rotated != 1,
    )


def _linears(modules: _Shapes, is_tied: bool, data: Mapping[str, Any]) -> _Shapes:
    """Return the linears; transformers' Conv1D, whose weights are transposed (see c_attn), is none."""
    others = (_EMBEDDINGS, _ROUTER, _EXPERT)
    linears = {
        name: shape
        for name, shape in modules.items()
        if not any(kind.search(name) for kind in others) and not (leaf(name) == HEAD and is_tied)
    }
    if any(leaf(name) == "c_attn" and rows < columns for name, (rows, columns) in linears.items()):
        linears = {name: shape for name, shape in linears.items() if not leaf(name).startswith("c_")}
    if not linears:
        name = next(iter(data.get("architectures") or ()), "it")
        raise SpecError(
            f"{name} has no linear that an adapter could be put on",
            key="model.path",
            hint="use a model whose layers are made of linears (transformers' Conv1D is none)",
        )
    return linears


def is_left_out(name: str, layers: int) -> bool:
    """Return whether no trainer reads a tensor: it follows from config.json, or is for later tokens, or for
    images and sound.
    """
    number = _LAYER.search(name)
    is_beyond = number is not None and 0 < layers <= int(number[1])
    is_later = name.startswith("mtp.") or is_beyond  # such layers no trainer computes
    return name.endswith(_DERIVED) or is_later or _OTHER_SENSES.search(name) is not None


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """Return the first of some fields that has a number, 0 where none has."""
    return next((config[key] for key in keys if isinstance(config.get(key), int) and config[key]), 0)


def _integer(config: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise SpecError(
        f"{where}: {keys[0]} is {config.get(keys[0])!r}, not a positive integer",
        hint="Is it a causal language model? Download it again.",
    )


def tensor_places(path: Path) -> dict[str, TensorPlace]:
    """Read where each tensor of a weight file lies, from its header alone.

    Raises SpecError for a file whose header is no safetensors header.
    """
    try:
        with open_file(path) as file:
            refuse_sparse(file, path)
            size = int.from_bytes(file.read(8), "little")
            if size > _HEADER_LIMIT:
                raise ValueError("its header is too long")
            text = file.read(size)
            if len(text) < size:
                raise ValueError("it ends too early")
            places = {}
            for name, about in json.loads(text).items():
                if name != "__metadata__":
                    start, end = (8 + size + int(offset) for offset in about["data_offsets"])
                    shape = tuple(int(length) for length in about["shape"])
                    places[name] = TensorPlace(str(about["dtype"]), shape, start, end)
            return places
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(
            f"{path} is damaged: {why}", key="model.path", hint="Download or copy it again."
        ) from None
