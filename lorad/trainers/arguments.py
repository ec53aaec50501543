"""What `trainer.backend_args` may say. Imports no backend: the preflight reads it, and every rank."""

ATTENTION = "attn_implementation"
"""The only argument of fsdp: a name, as transformers has them."""
SPLITS = {
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
}
"""How Megatron is told which stage has which layers."""


def own_fields(
    *, tp: int, pp: int, ep: int, dtype: object, bf16: bool, pads: bool, on_cpu: bool
) -> dict[str, object]:
    """Fields of Megatron's configuration that lorad decides.

    No dropout but the adapter's, no loss but the run's, gradients that autograd keeps, and routers
    whose choice can be replaced. dtype: torch's, of weights and of what stages send. pads: whether the
    vocabulary has to be padded.
    """
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": bf16,
        "fp16": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_router_fusion": False,
        "gradient_accumulation_fusion": False,
        "should_pad_vocab": pads,
        "make_vocab_size_divisible_by": 1,
        "use_cpu_initialization": on_cpu,
    }


OWN = frozenset(own_fields(tp=1, pp=1, ep=1, dtype=None, bf16=False, pads=False, on_cpu=False))
ADAPTS = {
    "fsdp": ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe", "deepseek_v3"),
    "megatron": ("qwen3_moe",),
}
"""Model types whose experts a trainer adapts."""
LOADS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types that Megatron-Bridge loads in lorad's tests; their only biases are qwen2's of q, k and v."""
REPLAYS = {"fsdp": ("qwen3_moe", "qwen2_moe", "olmoe"), "megatron": ("qwen3_moe",)}
"""Model types whose routes a backend replays. fsdp weighs experts itself, by the softmax of their scores;
megatron those whose experts it adapts."""
