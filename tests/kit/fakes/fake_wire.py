"""What the stand-ins of `daemon_fakes` need of frames and adapters, without numpy: its import would take
longer than everything else that they do."""

import hashlib
import json
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec

from lorad.errors import PoolLost
from lorad.protocol.heartbeat import HEART

MODULE = "model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {
    "base_model_name_or_path": "tiny",
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "r": 1,
    "lora_alpha": 2,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj"],
    "modules_to_save": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_rslora": False,
}
PREFIX = struct.Struct("<IIQ")  # of `lorad.protocol.frames`, here always without buffers


class Wire:
    """One end of a connection between a pool and who asks it."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def tell(self, message: Any) -> None:
        header = msgspec.msgpack.encode(message)
        self.end.sendall(PREFIX.pack(len(header), 0, len(header)) + header)

    def hear(self) -> dict[str, Any]:
        """A call or an answer. Raises EOFError at the end of the connection."""
        _, buffers, size = PREFIX.unpack(self._exactly(PREFIX.size))
        assert not buffers, "nobody sends arrays to a stand-in"
        heard: dict[str, Any] = msgspec.msgpack.decode(self._exactly(size))
        return heard

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (more := self.end.recv(size - len(data)))
            if not more:
                raise EOFError
        return data


def connected(path: Path) -> Wire:
    """Raises PoolLost."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(str(path))
    except OSError as error:
        end.close()
        raise PoolLost(f"no pool answers on {path}: {error.strerror}") from error
    return Wire(end)


def ask_status(pool: Wire) -> None:
    """Raises PoolLost."""
    try:
        with HEART.waits():
            pool.tell({"id": 1, "verb": "status", "args": {}})
            pool.hear()
    except (OSError, EOFError) as error:
        raise PoolLost(f"the pool went away: {error}") from error


def write_adapter(directory: Path, number: int) -> None:
    """What `write_peft` makes of a small adapter, another one for each version."""
    (directory / "adapter_model.safetensors").write_bytes(weights(number))
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")


def digest(number: int) -> str:
    return hashlib.sha256(weights(number)).hexdigest()


def weights(number: int) -> bytes:
    """adapter_model.safetensors, every number in it `number`."""
    halves = {"lora_A": (1, 4), "lora_B": (4, 1)}
    tensors = {
        f"base_model.model.{MODULE}.{half}.weight": {
            "dtype": "F32", "shape": shape, "data_offsets": (16 * place, 16 * place + 16)
        }
        for place, (half, shape) in enumerate(halves.items())
    }  # fmt: skip
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + struct.pack("<8f", *[number] * 8)
