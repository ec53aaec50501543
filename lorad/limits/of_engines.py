"""What engines cannot do."""

import json

from lorad.adapters.targets import HEAD, leaf
from lorad.limits.arguments import FUSES, OWN_BASE, RANKED
from lorad.limits.limit import BackendLimit, BackendSetup
from lorad.servers.kind import ServerKind
from lorad.servers.table import NAMES, SERVERS

_APART = {*RANKED, *SERVERS, *OWN_BASE}


def _unserved_linears(s: BackendSetup) -> tuple[str, str, str, str] | None:
    """Return the adapted linears that a server takes no adapters on: words, JSON, why and who does."""
    server = SERVERS[s.engine]
    leaves = {*map(leaf, s.adapter.modules)} if s.adapter else set()
    model_type = s.model.model_type if s.model else ""
    why, names = server.unserved.get(model_type, ("", ()))
    refused = sorted(leaves - server.takes(leaves, model_type))
    of_type = f" of {model_type}: {why}" if {*refused} <= {*names} else ""
    return (", ".join(refused), json.dumps(refused), of_type, _takers(leaves, s)) if refused else None


def _foreign_model(s: BackendSetup) -> tuple[str, str] | None:
    """Return why a server serves no adapters of the model, and who does."""
    leaves = {*map(leaf, s.adapter.modules)} if s.adapter else set()
    why = _refusal(SERVERS[s.engine], s)
    return (why, _takers(leaves, s)) if why else None


def _takers(leaves: set[str], s: BackendSetup) -> str:
    """Name the engines that take adapters on all of some linears of a model."""
    model_type = s.model.model_type if s.model else ""
    servers = (
        name
        for name, server in SERVERS.items()
        if not _refusal(server, s) and leaves <= server.takes(leaves, model_type)
    )
    return " or ".join((*servers, *sorted(OWN_BASE)))


def _refusal(server: ServerKind, s: BackendSetup) -> str:
    """Return why a server serves no adapters of the model, or nothing."""
    if s.model is None:
        return ""
    if s.model.rotates_in_part and s.model.model_type in server.whole_heads:
        return f"{server.tried} rotates whole heads, where config.json has partial_rotary_factor"
    without_gpu = {**server.gpu_types, **(server.gpu_mixtures if s.model.expert_count else {})}
    reasons = {**(without_gpu if s.device == "cpu" else {}), **server.foreign}
    return reasons.get(s.model.model_type, "")


_ROUNDED = BackendLimit(
    key="model.quantize",
    breaks=lambda s: s.quantize,
    why="{it}, but {s.engine} reads the checkpoint itself and would sample from other weights than the "
    "trainer trains on",
    hint="Use rollout.backend: builtin, or leave it out.",
)
_ANY = (
    BackendLimit(
        key="pool.mode",
        breaks=lambda s: (
            not {s.trainer, s.engine}.isdisjoint(_APART)
            and s.engine not in SERVERS
            and s.mode == "timesliced"
        ),
        why="timesliced is for an engine that can sleep, the {s.engine} engine cannot",
        hint=f"Leave it out (auto is resident), or set rollout.backend to {NAMES}.",
    ),
    BackendLimit(
        key="pool.mode",
        breaks=lambda s: {s.trainer, s.engine}.isdisjoint(_APART) and s.mode not in ("auto", "fused"),
        why="{s.mode} is for an engine beside the trainer, the {s.engine} engine is one with it",
        hint=f"Leave it out (auto), or set rollout.backend to {NAMES}.",
    ),
    BackendLimit(
        key="lora.dora",
        breaks=lambda s: s.adapter and s.adapter.dora and s.engine != "builtin",
        why="{s.engine} has no place for the magnitudes of DoRA",
        hint="Sample with rollout.backend: builtin, serve what `lorad export --merge` writes, or leave "
        "lora.dora out.",
    ),
)
_OF_TRANSFORMERS = (
    BackendLimit(
        key="pool.mode",
        breaks=lambda s: s.mode == "fused" and (s.trainer, s.engine) not in FUSES,
        why="fused is one base for trainer and engine, which {s.trainer} and {s.engine} do not share",
        hint="Leave it out (auto), set it to resident, or use trainer.backend: fsdp.",
    ),
    _ROUNDED,
)
_ANY_SERVER = (
    BackendLimit(
        key="pool.mode",
        breaks=lambda s: s.mode == "fused",
        why="fused is one process for trainer and engine, but {s.engine} is a server of its own",
        hint="Leave it out (auto), or set it to resident or timesliced.",
    ),
    _ROUNDED,
    BackendLimit(
        key="rollout.backend",
        breaks=_foreign_model,
        why="{s.engine} serves no adapters of {s.model.model_type}: {it[0]}",
        hint="Set it to {it[1]}.",
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
        hint="Leave them as they are with lora.exclude_modules: {it[1]}, or use rollout.backend: {it[3]}.",
    ),
)
OF_ENGINES = {"": _ANY, **dict.fromkeys(OWN_BASE, _OF_TRANSFORMERS), **dict.fromkeys(SERVERS, _ANY_SERVER)}
