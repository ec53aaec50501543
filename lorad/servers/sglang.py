"""The server SGLang, as 0.5.23 was seen to be."""

from lorad.servers.kind import ATTENTION, DELTA, KERNELS, MLP, ROTATED, UNCLAMPED, Parts, ServerKind

_DELTA = ("in_proj_q", "in_proj_k", "in_proj_v")
_PARTS = {"in_proj_qkv": Parts(_DELTA, last="in_proj_z")}
_NO_GATES = "0.5.23 has no target for them (sgl-project/sglang#31522)", ("in_proj_a", "in_proj_b")
_NO_START = "0.5.23 was not seen to start with it on a CPU"

KIND = ServerKind(
    name="sglang",
    title="SGLang",
    engine="lorad.engines.sglang.dialect:SglangEngine",
    dialect="lorad.engines.sglang.dialect:SglangDialect",
    distributions=("sglang",),
    tried="0.5.23",
    modules=("sgl_kernel",),
    gpu_modules=("flashinfer", "torch_memory_saver"),
    joined=(ATTENTION[:3], MLP[:2], DELTA),
    divided={"qwen3_5": _PARTS, "qwen3_5_moe": _PARTS},
    called=dict.fromkeys((*_DELTA, "in_proj_z"), "in_proj_qkvz"),
    targets=frozenset(  # it ends with a line on its usage when it is given another
        {
            *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"),
            *("kv_b_proj", "wq_b", "wk", "weights_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj"),
            *("gate_up_proj", "embed_tokens", "lm_head", "qkvr", "wo_ud"),
        }
    ),
    further=dict.fromkeys(("qwen3_5", "qwen3_5_moe"), (*DELTA, "out_proj")),  # with the target `all`
    unserved={"llama4": ROTATED, "qwen3_5": _NO_GATES, "qwen3_5_moe": _NO_GATES},
    foreign={
        "qwen3_next": "0.5.23 does not know the sizes of this model's linears",
        "nemotron_h": UNCLAMPED,
        "olmo3": "0.5.23 computes another base than transformers (0.29 nats rms apart)",
    },
    whole_heads=("phi3",),
    gpu_types={
        "gemma4": KERNELS,
        "granitemoehybrid": KERNELS,
        "llama4": _NO_START,
        "mistral3": _NO_START,
        "smollm3": "0.5.23 was not seen to compute its adapters on a CPU",
    },
    gpu_mixtures={"qwen3_5_moe": KERNELS},
    expert_types=("qwen3_moe",),
    reads_rslora=False,
    reads_ranks=False,
    records_routes=True,
    process_mib=1630,
    fills_cache=True,
    sizes_by_leaf=True,  # in lora/mem_pool.py, as for the linears of a shared MLP
    schema_hint="Start it with engine_args: {grammar-backend: xgrammar}.",
)
