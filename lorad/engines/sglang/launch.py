"""Start an SGLang server that listens on one Unix socket and samples each request by its own seed.

    python launch.py --uds SOCKET <flags of sglang.launch_server>

Run by SGLang's own interpreter, as a path; lorad need not be installed there. It changes seven things in
SGLang, each in memory only, and two in its environment; a release that lacks one of the places is refused by
name:

- uvicorn serves on SOCKET, mode 0600, and on no TCP port. Flags that choose another server are refused.
- `sampling_seed` of a request counts without --enable-deterministic-inference. SGLang's schedulers are
  spawned and import this file again as `__mp_main__`: what is at module level holds there too.
- Qwen3-MoE has its embeddings for a head where config.json says so; SGLang makes a head of zeros.
- On a CPU, experts with adapters are computed by `plain_experts.py`: SGLang's own kernel is Triton's, made
  for GPUs alone, and the first request would end the server.
- On a CPU, routes that are recorded lie in plain memory, not in memory that CUDA knows.
- On GPUs the share of memory that lorad grants is of the whole device, and SGLang's own of what is free when
  it starts: the one is made into the other.
- Several GPUs are named by their numbers: SGLang's all-reduce between them would be left out with UUIDs.
- Beside its memory saver, which would refuse to start, torch's allocator has no `expandable_segments`.
- The call of itself after its start goes to SOCKET, not to a port that a stranger may hold.

Temporary files, among them the sockets between SGLang's processes (which unpickle what they are sent), lie in
a directory of mode 0700 beside SOCKET.
"""

import contextlib
import hashlib
import http.client
import os
import runpy
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

# SGLang wants a port, though nothing listens there: one that no ordinary user can take.
NOWHERE = ["--host", "127.0.0.1", "--port", "1"]
_OTHER_SERVERS = (
    *("enable_http2", "enable_ssl_refresh", "ssl_certfile", "smg_grpc_mode", "grpc_mode", "grpc_port"),
    *("sidecar", "encoder_only", "use_ray"),
)
_OTHER_SERVERS_BY_ENVIRONMENT = ("SGLANG_GRPC_PORT", "SGLANG_RUST_SERVER")
_PLAIN_EXPERTS = Path(__file__).resolve().parents[1] / "plain_experts.py"
_MOST_OF_FREE = 0.95  # a batch needs some, too
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"
_SEEDED_BACKENDS = ("pytorch", "ascend")


def _refuse(message: str) -> NoReturn:
    print(f"lorad: {message}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def _lacking(place: str) -> NoReturn:
    import sglang

    _refuse(f"SGLang {sglang.__version__} has no {place}: install sglang==0.5.23, which this lorad knows")


def seed_of(request: Any) -> int:
    """Return the request's own seed, else one of its id, which every tensor-parallel rank has alike."""
    seed = request.sampling_params.sampling_seed
    if seed is not None:
        return int(seed)
    digest = hashlib.blake2b(str(request.rid).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _mend_cpu_experts() -> None:
    """Compute experts with adapters in plain torch, and keep routes out of memory that CUDA registers."""
    import torch
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    if not hasattr(FusedMoEWithLoRA, "_forward_with_lora"):
        _lacking("FusedMoEWithLoRA._forward_with_lora")
    plain_experts = runpy.run_path(str(_PLAIN_EXPERTS))["plain_experts"]

    def forward(layer: Any, hidden_states: Any, topk_output: Any, lora_info: Any, **_: Any) -> Any:
        config = layer.moe_runner_config
        is_plain = config.activation == "silu" and config.is_gated and not config.apply_router_weight_on_input
        if not is_plain or config.routed_scaling_factor not in (None, 1.0):
            raise NotImplementedError(f"lorad computes experts on a CPU as Qwen3-MoE has them, not {config}")
        weights, index, _logits = topk_output
        base = layer.base_layer
        slots = lora_info.token_lora_mapping
        of_gate_up, of_down = _adapters_of(lora_info)
        return plain_experts(
            hidden_states, index, weights, base.w13_weight, base.w2_weight, slots, of_gate_up, of_down
        )

    try:
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    except ImportError:
        _lacking("ALLOC_MEMORY_FUNCS in sglang.srt.mem_cache.pool_host.common")

    def plain(shape: Any, *, dtype: Any, **_: Any) -> Any:
        return torch.empty(shape, dtype=dtype)

    FusedMoEWithLoRA._forward_with_lora = forward
    ALLOC_MEMORY_FUNCS["cpu"] = plain


def _adapters_of(info: Any) -> tuple[Any, Any]:
    """Return what computes the adapters' share of gate and up, which lie in one tensor, and of down."""
    import torch

    rank = info.max_lora_rank

    def of_gate_up(slot: int, expert: int, rows: Any) -> Any:
        low = rows @ info.gate_up_lora_a_weights[slot, expert].T
        gate, up = info.gate_up_lora_b_weights[slot, expert].chunk(2)
        return torch.cat([low[:, :rank] @ gate.T, low[:, rank:] @ up.T], dim=1)

    def of_down(slot: int, expert: int, rows: Any) -> Any:
        return rows @ info.down_lora_a_weights[slot, expert].T @ info.down_lora_b_weights[slot, expert].T

    return of_gate_up, of_down


def _mend() -> None:
    # `sampling_seed` of every batch is filled: SGLang merges batches row by row only when both have it
    try:
        import torch
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        merged = SamplingBatchInfo.from_schedule_batch.__func__
    except (ImportError, AttributeError):
        _lacking("SamplingBatchInfo.from_schedule_batch")

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = merged(cls, batch, vocab_size)
        if info.sampling_seed is None:
            seeds = torch.tensor([seed_of(request) for request in batch.reqs], dtype=torch.int64)
            info.sampling_seed = seeds.to(batch.device, non_blocking=True)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    if os.environ.get("LORAD_TIED"):  # Qwen3-MoE gets the head that it shares with its embeddings
        from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

        original = Qwen3MoeForCausalLM.load_weights

        def load_weights(model: Any, *args: Any, **options: Any) -> Any:
            loaded = original(model, *args, **options)
            model.lm_head.weight = model.model.embed_tokens.weight
            return loaded

        Qwen3MoeForCausalLM.load_weights = load_weights
    if os.environ.get("LORAD_EXPERTS"):
        _mend_cpu_experts()


def check_arguments(server: Any) -> None:
    """Refuse parsed ServerArgs by which SGLang would listen elsewhere, or sample without seeds."""
    for name in _OTHER_SERVERS:
        if getattr(server, name, None):
            _refuse(
                f"--{name.replace('_', '-')} starts a server that does not listen on a Unix socket: leave "
                "it out"
            )
    for name in _OTHER_SERVERS_BY_ENVIRONMENT:
        if os.environ.get(name, "").lower() not in ("", "0", "false"):
            _refuse(f"{name} starts a server that does not listen on a Unix socket: unset it")
    for name in ("tokenizer_worker_num", "nnodes", "dp_size"):
        if getattr(server, name, 1) != 1:
            _refuse(f"--{name.replace('_', '-')} must be 1")
    if server.sampling_backend not in _SEEDED_BACKENDS:
        _refuse(f"--sampling-backend must be pytorch, not {server.sampling_backend}: others ignore seeds")
    if not server.skip_server_warmup:
        _refuse("--skip-server-warmup is needed: the warm-up asks a TCP port")


def _serve_on(path: Path) -> None:
    """Make uvicorn listen on `path`, whose mode it keeps: a file of its own would get 0666."""
    try:
        from sglang.srt.entrypoints.http_server import uvicorn
    except ImportError:
        _lacking("uvicorn in sglang.srt.entrypoints.http_server")
    original = uvicorn.Config.__init__

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in ("host", "port", "fd"):
            options.pop(name, None)
        original(self, *args, **{**options, "uds": str(path)})

    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with socket.socket(socket.AF_UNIX) as place:
        place.bind(str(path))
    path.chmod(0o600)
    uvicorn.Config.__init__ = __init__


def _freeze_over(path: Path) -> None:
    """Let SGLang's call of itself (which takes start-up objects out of garbage collection) go to `path`."""
    from sglang.srt.entrypoints import http_server

    def freeze(_server: Any) -> None:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.sock.settimeout(10)
            connection.sock.connect(str(path))
            connection.request("POST", "/freeze_gc")
            connection.getresponse().read()

    if not hasattr(http_server, "_freeze_gc_after_server_warmup"):
        _lacking("_freeze_gc_after_server_warmup")
    http_server._freeze_gc_after_server_warmup = freeze


def prepare_environment(arguments: list[str]) -> None:
    """Change what SGLang's processes would stumble over in the environment, before torch sees it."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(devices) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(_number, devices))
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML counts
    if "--enable-memory-saver" not in arguments:
        return
    for name in _ALLOCATORS:
        if _EXPANDABLE in (value := os.environ.get(name, "")):
            kept = [part for part in value.split(",") if _EXPANDABLE not in part]
            os.environ[name] = ",".join(kept)
            print(f"lorad: {_EXPANDABLE} is taken out of {name}: SGLang sleeps", file=sys.stderr, flush=True)


def _number(device: str) -> str:
    """Return a GPU's index, as `nvidia-smi` has it, from that index or a UUID."""
    if device.isdigit():
        return device
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(device)))


def share_of_free(share: float, devices: list[str]) -> float:
    """Return the least share of its free memory that `share` of the whole of a device is.

    NVML is asked by index or UUID: CUDA would take memory for a process that computes nothing.
    """
    import pynvml

    pynvml.nvmlInit()
    shares = [_MOST_OF_FREE]
    for device in devices:
        ask = pynvml.nvmlDeviceGetHandleByIndex if device.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        memory = pynvml.nvmlDeviceGetMemoryInfo(ask(int(device) if device.isdigit() else device))
        shares.append(share * memory.total / max(1, memory.free))
    return min(shares)


def main() -> None:
    sys.path = [entry for entry in sys.path if Path(entry).absolute() != Path(__file__).absolute().parent]
    if sys.argv[1:2] != ["--uds"] or len(sys.argv) < 3:
        _refuse("usage: launch.py --uds SOCKET <flags of sglang.launch_server>")
    path = Path(sys.argv[2]).absolute()
    arguments = sys.argv[3:]
    # files of this process and its children are private from here on
    os.umask(0o077)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "lorad" / "torchinductor"))
    directory = tempfile.mkdtemp(prefix="sgl", dir=path.parent)
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    # Ranks meet in a file: torch's TCP store answers everybody who connects.
    os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{directory}/ranks")
    prepare_environment(arguments)
    try:
        _mend()
        # like `python -m sglang.launch_server`, until a signal ends it
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        load_plugins()
        if share := os.environ.get("LORAD_DEVICE_SHARE"):
            part = share_of_free(float(share), os.environ["CUDA_VISIBLE_DEVICES"].split(","))
            arguments = [*arguments, "--mem-fraction-static", f"{part:.4f}"]  # the last one counts
        server = prepare_server_args([*arguments, *NOWHERE])
        check_arguments(server)
        _serve_on(path)
        _freeze_over(path)
        try:
            run_server(server)
        finally:
            kill_process_tree(os.getpid(), include_parent=False)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__mp_main__":
    _mend()
elif __name__ == "__main__":
    main()
