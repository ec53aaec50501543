"""What engines cannot do."""

import json

from lorad.adapters.targets import HEAD, leaf
from lorad.limits.arguments import RANKED
from lorad.limits.limit import BackendLimit, BackendSetup
from lorad.spec.numbers import SERVERS

TARGETS = {
    "sglang": {
        *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"),
        *("wq_b", "wk", "weights_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"),
        *("embed_tokens", "lm_head", "qkvr", "wo_ud"),
    }
}
"""Leaf names of the linears on which a server takes adapters, where it has a list: SGLang 0.5.23 ends with a
line on its usage when it is given another."""
MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_ROTATED = (
    "q_proj and k_proj of the base are reordered when it is loaded, those of adapters are not",
    _ATTENTION[:2],
)
_UNSERVED = {
    ("vllm", "glm4"): ("its names for gate_up_proj are gate_proj and up_proj", ("gate_up_proj",)),
    ("vllm", "llama4"): _ROTATED,
    ("sglang", "llama4"): _ROTATED,
    ("sglang", "qwen3_next"): ("it does not know the sizes of this model's linears", (*_ATTENTION, *MLP)),
}
"""Why vLLM 0.32 or SGLang 0.5.23 takes no adapters on linears of a model type, by their leaf names."""
_APART = {*RANKED, *SERVERS}
RECORDS = {"sglang"}  # servers that say the routes of tokens
_SERVER_NAMES = " or ".join(SERVERS)


def _unserved_linears(s: BackendSetup) -> tuple[str, str, str] | None:
    """Return the adapted linears that a server takes no adapters on: words, JSON and why."""
    leaves = {*map(leaf, s.adapter.modules)} if s.adapter else set()
    kind = s.model.model_type if s.model else ""
    why, names = _UNSERVED.get((s.engine, kind), ("", ()))
    if left := sorted(leaves - TARGETS.get(s.engine, leaves)):
        return ", ".join(left), json.dumps(left), ""
    left = sorted(leaves & {*names})
    return (", ".join(left), json.dumps(left), f" of {kind}: {why}") if left else None


_ANY = (
    BackendLimit(
        key="pool.mode",
        breaks=lambda s: s.trainer in RANKED and s.engine not in SERVERS and s.mode == "timesliced",
        why="timesliced is for an engine that can sleep, the {s.engine} engine cannot",
        hint=f"Leave it out (auto is resident), or set rollout.backend to {_SERVER_NAMES}.",
    ),
    BackendLimit(
        key="pool.mode",
        breaks=lambda s: {s.trainer, s.engine}.isdisjoint(_APART) and s.mode not in ("auto", "fused"),
        why="{s.mode} is for an engine beside the trainer, the {s.engine} engine is one with it",
        hint=f"Leave it out (auto), or set rollout.backend to {_SERVER_NAMES}.",
    ),
    BackendLimit(
        key="lora.dora",
        breaks=lambda s: s.adapter and s.adapter.dora and s.engine != "builtin",
        why="{s.engine} has no place for the magnitudes of DoRA",
        hint="Sample with rollout.backend: builtin, serve what `lorad export --merge` writes, or leave "
        "lora.dora out.",
    ),
)
_ANY_SERVER = (
    BackendLimit(
        key="pool.mode",
        breaks=lambda s: s.mode == "fused",
        why="fused is one process for trainer and engine, but {s.engine} is a server of its own",
        hint="Leave it out (auto), or set it to resident or timesliced.",
    ),
    BackendLimit(
        key="model.quantize",
        breaks=lambda s: s.quantize,
        why="{it}, but {s.engine} reads the checkpoint itself and would sample from other weights than the "
        "trainer trains on",
        hint="Use rollout.backend: builtin, or leave it out.",
    ),
    BackendLimit(
        key="lora.target_modules",
        breaks=lambda s: s.adapter and HEAD in map(leaf, s.adapter.modules),
        why=f"{{s.engine}} takes no adapter on {HEAD}",
        hint="Exclude it.",
    ),
    BackendLimit(
        key="lora.target_modules",
        breaks=_unserved_linears,
        why="{s.engine} takes no adapters on {it[0]}{it[2]}",
        hint="Leave them as they are with lora.exclude_modules: {it[1]}, or use another rollout.backend.",
    ),
)
OF_ENGINES = {"": _ANY, **dict.fromkeys(SERVERS, _ANY_SERVER)}
