"""The command line and the environment of a vLLM server."""

from pathlib import Path
from typing import Any

from lorad.adapters.targets import EXPERTS
from lorad.engines.remote.dialect import Dialect, ServerSettings, command_line, common_environment
from lorad.models.directory import BYTES, read_json
from lorad.models.facts import read_facts
from lorad.servers.vllm import KIND

_LAUNCHER = Path(__file__).with_name("launch.py")
BASE_NAME = "base"  # what the server calls the base
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as the highest

CONTEXT_MARGIN = 1  # to score takes one token more than it scores
_VERSIONS_MARGIN = 1  # an adapter is loaded while its predecessor is still there
_CPU_CACHE_BYTES = 1 << 30
_CPU_CACHE_CONTEXTS = 4  # for how many whole contexts there is room in any case

_WHO_REACHES_IT = """
    host port uds api-key config ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers
    enable-ssl-refresh root-path middleware allowed-origins allow-credentials grpc grpc-port headless
    api-server-count omni nnodes node-rank master-addr master-port distributed-executor-backend
"""
_ONE_ENGINE = """
    data-parallel-size dp data-parallel-rank data-parallel-start-rank data-parallel-size-local
    data-parallel-address data-parallel-rpc-port data-parallel-backend data-parallel-hybrid-lb
    data-parallel-external-lb data-parallel-multi-port-external-lb data-parallel-supervisor-port
    pipeline-parallel-size pp tensor-parallel-size tp
"""
_MODEL = """
    model model-tag served-model-name max-model-len enable-lora no-enable-lora lora-modules max-lora-rank
    max-loras max-cpu-loras lora-target-modules default-mm-loras
"""
_RELIED_ON = """
    logprobs-mode generation-config override-generation-config skip-tokenizer-init enable-sleep-mode
    no-enable-sleep-mode disable-log-stats tokens-only runner convert enable-request-id-headers
"""


class VllmCommand(Dialect):
    """The part of the dialect that starts vLLM."""

    kind = KIND
    reserved = frozenset((_WHO_REACHES_IT + _ONE_ENGINE + _MODEL + _RELIED_ON).split())

    def command(self, python: str, settings: ServerSettings, socket: Path) -> list[str]:
        has_towers = {"text_config", "vision_config"} <= read_json(settings.model / "config.json").keys()
        flags: dict[str, Any] = {
            "served-model-name": BASE_NAME,
            "dtype": settings.dtype,
            "max-model-len": settings.context_length + CONTEXT_MARGIN,
            "tensor-parallel-size": settings.tp,
            "max-num-seqs": settings.max_running,
            "enable-lora": True,
            "max-lora-rank": next((rank for rank in _RANKS if rank >= settings.max_rank), settings.max_rank),
            "max-loras": settings.slots,
            "max-cpu-loras": max(settings.max_versions, settings.slots) + _VERSIONS_MARGIN,
            "lora-target-modules": list(settings.targets),
            # each expert's own pairs, also where vLLM holds all experts of a layer in one tensor
            "enable-mixed-moe-lora-format": EXPERTS in settings.targets or None,
            "logprobs-mode": "processed_logprobs" if settings.scaled_logprobs else "raw_logprobs",
            # no towers for images, whose processors a directory may lack
            "language-model-only": has_towers or None,
            "generation-config": "vllm",  # not the model's own: it has stop tokens, top_k and the like
            "enable-log-requests": False,
            "log-error-stack": False,
            "disable-uvicorn-access-log": True,
            "uvicorn-log-level": "warning",
        }
        if settings.device == "cpu":
            context = read_facts(settings.model).cached * BYTES[settings.dtype] * settings.context_length
            cache = max(_CPU_CACHE_BYTES, _CPU_CACHE_CONTEXTS * context)
            flags |= {"enforce-eager": True, "kv-cache-memory-bytes": cache}
        else:
            flags["gpu-memory-utilization"] = round(settings.memory_fraction, 4)
            if settings.sleep:
                flags["enable-sleep-mode"] = True
        for flag, value in settings.engine_args.items():
            name = flag.lstrip("-").replace("_", "-")
            valued = name in flags and not isinstance(flags[name], bool)
            flags[name] = None if value is False and valued else value
        words = command_line(flags, negates=True)
        return [python, str(_LAUNCHER), str(settings.model), "--uds", str(socket), *words]

    def environment(self, settings: ServerSettings) -> dict[str, str]:
        variables = common_environment(settings) | {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_SERVER_DEV_MODE": "1",  # routes to sleep, to abort, to empty the prefix cache
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for CONTEXT_MARGIN
            # A connection that is kept open must not be closed just when it is used again.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
            "VLLM_HOST_IP": "127.0.0.1",  # where its own processes meet
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if settings.device != "cpu":
            # it samples otherwise; all that lorad knows of vLLM is of V1
            return variables | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        return variables | {
            "LORAD_DEVICE": "cpu",  # for launch.py
            **({"LORAD_EXPERTS": "1"} if read_facts(settings.model).experts else {}),
            # or each server binds its threads to the machine's first cores
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # the first sample would wait for a C++ compiler
        }
