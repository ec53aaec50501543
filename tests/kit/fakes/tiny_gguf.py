"""A Llama of two layers in a GGUF file and in a wheel, as llama.cpp and a package of an index have it."""

import hashlib
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from lorad.box.models import Wheel

HIDDEN, WIDTH, HEADS, KV_HEADS, LAYERS = 64, 96, 2, 1, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "h e", "l l", "he ll"]  # the first would join digits, which are apart by the pre-tokenizer
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
FACTS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}
_F32, _Q4_1, _Q8_0 = 0, 3, 8


def weights() -> dict[str, np.ndarray]:
    """Return the tensors under llama.cpp's names, in the order of transformers."""
    draws = np.random.default_rng(0)
    of_layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
        "attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (WIDTH, HIDDEN),
        "ffn_up": (WIDTH, HIDDEN),
        "ffn_down": (HIDDEN, WIDTH),
    }
    shapes = {f"blk.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in of_layer.items()}
    shapes |= {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    return {name: draws.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tensors: dict[str, np.ndarray], **facts: Any) -> None:
    """Write norms as F32, embeddings as Q8_0 and all else as Q4_1; q and k turned as llama.cpp has them."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    places, data = b"", b""
    for name, values in tensors.items():
        if (count := heads.get(name.split(".")[-2])) is not None:
            values = values.reshape(count, 2, -1, HIDDEN).swapaxes(1, 2).reshape(values.shape)
        kind = _F32 if values.ndim == 1 else _Q8_0 if name == "token_embd.weight" else _Q4_1
        places += _text(name) + struct.pack("<I", values.ndim)
        places += struct.pack(f"<{values.ndim}Q", *reversed(values.shape)) + struct.pack(
            "<IQ", kind, len(data)
        )
        data += values.tobytes() if kind == _F32 else b"".join(map(_BLOCK[kind], values.reshape(-1, 32)))
        data += bytes(-len(data) % 32)
    known = FACTS | {key.replace("__", "."): value for key, value in facts.items()}
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(known))
    head += b"".join(_text(key) + _value(value) for key, value in known.items()) + places
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def make_wheel(directory: Path, **facts: Any) -> tuple[Path, Wheel]:
    """Make a wheel that pip takes; returns its file and what lorad knows of it."""
    directory.mkdir(parents=True, exist_ok=True)
    write_gguf(directory / "tiny.gguf", weights(), **facts)
    path = directory / "tiny_llama-0.1-py3-none-any.whl"
    about = "tiny_llama-0.1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(directory / "tiny.gguf", "tiny_llama/tiny.gguf")
        archive.writestr(f"{about}/LICENSE", "Apache License, Version 2.0")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 0.1\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    member = "tiny_llama/tiny.gguf"
    return path, Wheel("Tiny", "Apache-2.0", "tiny-llama==0.1", digest, member, path.stat().st_size, 1 << 20)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """Return a fact with its type before it."""
    if isinstance(value, list):
        inner = [_value(one) for one in value]
        return (
            struct.pack("<I", 9)
            + inner[0][:4]
            + struct.pack("<Q", len(inner))
            + b"".join(v[4:] for v in inner)
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def _q8_0(block: np.ndarray) -> bytes:
    scale = np.float16(np.abs(block).max() / 127)
    return scale.tobytes() + np.round(block / np.float32(scale)).astype(np.int8).tobytes()


def _q4_1(block: np.ndarray) -> bytes:
    least, scale = np.float16(block.min()), np.float16((block.max() - block.min()) / 15)
    values = np.clip(np.round((block - np.float32(least)) / np.float32(scale)), 0, 15).astype(np.uint8)
    return (
        scale.tobytes()
        + least.tobytes()
        + bytes(int(a) | int(b) << 4 for a, b in zip(values[:16], values[16:], strict=True))
    )


_BLOCK = {_Q8_0: _q8_0, _Q4_1: _q4_1}


def patched(wheel: Wheel) -> str:
    """Return Python that has `lorad models get` know this wheel as `tiny`, for an interpreter of its own."""
    return f"from lorad.box import models; models.MODELS['tiny'] = models.Wheel(*{json.dumps(list(wheel))})\n"
