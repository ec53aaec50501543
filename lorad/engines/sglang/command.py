"""The command line and the environment of an SGLang server."""

from pathlib import Path
from typing import Any

from lorad.adapters.targets import EXPERTS, HEAD
from lorad.engines.remote.dialect import Dialect, ServerSettings, command_line, common_environment
from lorad.models.facts import read_facts
from lorad.servers.sglang import KIND

_LAUNCHER = Path(__file__).with_name("launch.py")
CONTEXT_MARGIN = 8  # SGLang takes only prompts that are some tokens shorter than its context
_LOADED_MARGIN = 4  # versions for a moment: a successor beside its predecessor, copies to attest them
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


class SglangCommand(Dialect):
    """The part of the dialect that starts SGLang."""

    kind = KIND
    reserved = frozenset(f"{_WHO_REACHES_IT} {_ONE_SCHEDULER} {_MODEL_AND_ADAPTERS} {_THE_DIALECT}".split())

    def command(self, python: str, settings: ServerSettings, socket: Path) -> list[str]:
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
        flags.update(
            {name.lstrip("-").replace("_", "-"): value for name, value in settings.engine_args.items()}
        )
        return [python, str(_LAUNCHER), "--uds", str(socket), *command_line(flags, negates=False)]

    def environment(self, settings: ServerSettings) -> dict[str, str]:
        variables = common_environment(settings) | {
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_MAMBA_CONV_DTYPE": settings.dtype,  # of states between tokens; in bfloat16 else
        }
        facts = read_facts(settings.model)
        own = {name.lstrip("-").replace("_", "-") for name in settings.engine_args}
        is_on_cpu = settings.device == "cpu"
        if is_on_cpu:
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
        if facts.model_type == "qwen3_moe" and HEAD not in facts.linears:  # the rest is for launch.py
            variables["LORAD_TIED"] = "1"
        if is_on_cpu and facts.experts:
            variables["LORAD_EXPERTS"] = "1"
        if not is_on_cpu and "mem-fraction-static" not in own:
            variables["LORAD_DEVICE_SHARE"] = f"{settings.memory_fraction:.4f}"
        return variables
