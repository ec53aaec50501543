"""The ranks, models and arguments that a trainer takes. Imports no backend."""

from collections.abc import Iterable, Iterator

from lorad.adapters.targets import MEGATRON

AXES = ("tp", "pp", "cp", "ep", "dp")
AXES_OF = {"fsdp": ("dp", "cp"), "megatron": ("tp", "pp", "ep", "dp")}
RANKED = frozenset(AXES_OF)  # backends whose trainer is made of processes of its own
OWN_BASE = frozenset({"transformers"})
"""Engines in the pool's process with a base of their own beside the trainer's."""
FUSES = frozenset({("fsdp", "transformers")})
"""Trainers with ranks and engines that share one base in the pool's process, where there is one rank."""
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
ADAPTS = {
    "fsdp": ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe", "deepseek_v3"),
    "megatron": ("qwen3_moe",),
}
"""Model types whose experts a trainer adapts."""
LOADS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types that Megatron-Bridge loads in lorad's tests; their only biases are qwen2's of q, k and v."""
UNBRIDGED = ("smollm3", "olmo3", "glm4", "phi3", "granitemoehybrid", "llama4")
"""Model types that Megatron-Bridge 0.6.2 says it does not support."""
COMPOSITE = ("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3")
"""Model types whose language model is one part of several."""
NEEDS_TE = ("gemma", "gemma2", "gemma3_text", "deepseek_v3", "qwen3_next")
"""Model types whose norms, attention or layers Megatron has in Transformer Engine alone."""
REPLAYS = {"fsdp": ("qwen3_moe", "qwen2_moe", "olmoe"), "megatron": ("qwen3_moe",)}
"""Model types whose routes a backend replays. fsdp weighs experts itself, by the softmax of their scores;
megatron those whose experts it adapts."""
_FUSED = {names[0]: names for names in MEGATRON.values() if len(names) > 1}


def fused(modules: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield all linears that Megatron computes as one product, for each product that has any of `modules`."""
    begun: set[str] = set()
    for module in modules:
        parent, _, last = module.rpartition(".")
        for first, names in _FUSED.items():
            if last in names and f"{parent}.{first}" not in begun:
                begun.add(f"{parent}.{first}")
                yield tuple(f"{parent}.{name}" for name in names)
