"""The command line and the environment of an SGLang server."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lorad.adapters.targets import EXPERTS, HEAD
from lorad.engines.remote.dialect import ServerSettings, on_gpu
from lorad.models.facts import read_facts
from lorad.servers.sglang import KIND

_LAUNCHER = Path(__file__).with_name("launch.py")

# SGLang takes only prompts that are some tokens shorter than the context that it is given.
CONTEXT_MARGIN = 8
# Versions that are loaded for a moment: a successor beside its predecessor, copies to attest them.
_LOADED_MARGIN = 4

_WHO_REACHES_IT = """
    host port uds api-key admin-api-key config enable-http2 enable-ssl-refresh ssl-keyfile ssl-certfile
    ssl-ca-certs ssl-keyfile-password grpc-mode smg-grpc-mode grpc-port sidecar sidecar-args
    encoder-only use-ray nnodes node-rank dist-init-addr fastapi-root-path
"""
_ONE_SCHEDULER = """
    dp dp-size data-parallel-size tokenizer-worker-num tp tp-size tensor-parallel-size
    enable-dp-attention
"""
_MODEL_AND_ADAPTERS = """
    model model-path device context-length enable-lora lora-paths max-lora-rank max-loras-per-batch
    max-loaded-loras
"""
_THE_DIALECT = """
    sampling-backend skip-server-warmup skip-tokenizer-init incremental-streaming-output
    allow-auto-truncate enable-return-routed-experts
"""
RESERVED = frozenset(f"{_WHO_REACHES_IT} {_ONE_SCHEDULER} {_MODEL_AND_ADAPTERS} {_THE_DIALECT}".split())


def command(python: str, settings: ServerSettings, socket: Path) -> list[str]:
    assert KIND.targets is not None
    targets = [name for name in settings.targets if name != EXPERTS]
    if not KIND.targets.issuperset(targets):
        targets = ["all"]  # the flag has no names for linears of gated delta nets, which `all` finds
    flags: dict[str, Any] = {
        "model-path": settings.model,
        "dtype": settings.dtype,
        "context-length": settings.context_length + CONTEXT_MARGIN,
        "tp-size": settings.tp,
        "mem-fraction-static": round(settings.memory_fraction, 4),
        "max-running-requests": settings.max_running,
        "enable-lora": True,
        "enable-return-routed-experts": settings.routes is not None,
        "max-lora-rank": settings.max_rank,
        "lora-target-modules": targets,
        "max-loras-per-batch": settings.slots + 1,  # the base counts
        # Above this SGLang unloads one by itself and says nothing.
        "max-loaded-loras": max(settings.max_versions, settings.slots) + _LOADED_MARGIN,
        "sampling-backend": "pytorch",  # the only one of a GPU that takes seeds
        "grammar-backend": "none",
        "incremental-streaming-output": True,
        "skip-server-warmup": True,
        "sleep-on-idle": True,  # its scheduler polls with a whole core else
        "enable-metrics": True,
        "log-level-http": "warning",
    }
    if settings.device == "cpu":
        flags |= {
            "device": "cpu",
            "attention-backend": "torch_native",
            "lora-backend": "torch_native",
            "disable-cuda-graph": True,
            "disable-overlap-schedule": True,
            "max-total-tokens": (settings.max_running + 1) * (settings.context_length + CONTEXT_MARGIN),
        }
    else:
        flags["device"] = "cuda"
        if settings.sleep:  # without the backup of the weights, what wakes up is noise
            flags |= {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
        if EXPERTS in settings.targets:
            flags |= {"lora-backend": "triton", "lora-use-virtual-experts": True}
    flags.update({name.lstrip("-").replace("_", "-"): value for name, value in settings.engine_args.items()})
    return [python, str(_LAUNCHER), "--uds", str(socket), *_words(flags)]


def environment(settings: ServerSettings) -> dict[str, str]:
    common = {
        # A path that does not exist is asked of the hub.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_MAMBA_CONV_DTYPE": settings.dtype,  # of states between tokens; in bfloat16 else
        "OMP_NUM_THREADS": str(settings.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    facts = read_facts(settings.model)
    if facts.model_type == "qwen3_moe" and HEAD not in facts.linears:  # the rest is for launch.py
        common["LORAD_TIED"] = "1"
    if settings.device == "cpu" and facts.experts:
        common["LORAD_EXPERTS"] = "1"
    own = {name.lstrip("-").replace("_", "-") for name in settings.engine_args}
    if settings.device != "cpu" and "mem-fraction-static" not in own:
        common["LORAD_DEVICE_SHARE"] = f"{settings.memory_fraction:.4f}"
    if settings.device == "cpu":
        return {**common, "SGLANG_USE_CPU_ENGINE": "1"}
    return {**common, **on_gpu(settings)}


def _words(flags: Mapping[str, Any]) -> Iterator[str]:
    for name, value in flags.items():
        if value is None or value is False:
            continue
        yield f"--{name}"
        if isinstance(value, list | tuple):
            yield from map(str, value)
        elif value is not True:
            yield str(value)
