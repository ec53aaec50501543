"""Which linears an adapter is put on: Hugging Face, Megatron and wildcard names -> logical module names.

An entry is one of
- `all-linear`: every linear but `lm_head`;
- a name or the end of one, as PEFT matches it: `q_proj`, `self_attn.q_proj`,
    `model.layers.0.self_attn.q_proj`;
- the same in Megatron's words: `linear_qkv`, `linear_fc1`, or the canonical `linear_q`, `linear_fc1_gate`;
- a wildcard over the full name: `*.layers.0.*.q_proj`, `*.layers.0.*.linear_qkv`.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from lorad.errors import SpecError

ALL_LINEAR = "all-linear"
HEAD = "lm_head"
EXPERTS = "experts"  # the last part of the name of all experts of a layer together
MEGATRON: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "output_layer": (HEAD,),
}
_MEGATRON_PATH = {"decoder": "model", "self_attention": "self_attn"}
_WILD = frozenset("*?[")
_OF_EXPERT = re.compile(rf"(.+\.{EXPERTS})\.\d+\.\w+")
_IN_LAYERS = re.compile(rf"(?:^|\.)(layers\.\d+\..+|{HEAD}(?:\.\w+)?$)")
_LAYER = re.compile(r"\.[^.]*\.(\d+)\.")  # the first counts, as for PEFT


class Named(NamedTuple):
    """The modules that adapter_config.json names, as PEFT compares them: entries are names or their ends.

    Entries are None in place of a regular expression, which is not evaluated here. `layers` None means all.
    """

    targets: frozenset[str] | None
    excluded: frozenset[str] | None
    layers: frozenset[int] | None = None

    def may_have(self, module: str) -> bool:
        """Return whether an adapter on a module would be read by PEFT."""
        if self.layers is not None and layer_of(module) not in self.layers:
            return False
        parts = module.split(".")
        ends = {".".join(parts[start:]) for start in range(len(parts))}  # `mlp.up_proj` and `up_proj`
        is_target = self.targets is None or bool(self.targets & ends)
        return is_target and not (self.excluded or frozenset()) & ends


def layer_of(module: str) -> int | None:
    """Return the layer's number: `model.layers.3.mlp.experts.7.up_proj` -> 3."""
    match = _LAYER.search(module)
    return int(match[1]) if match else None


def match_modules(
    shapes: Mapping[str, tuple[int, int]],
    target_modules: str | Sequence[str],
    exclude_modules: str | Sequence[str] = (),
    others: Iterable[str] = (),
) -> tuple[str, ...]:
    """Return the sorted logical names of `shapes` that `target_modules` names and `exclude_modules` does not.

    `shapes` has (out, in) of every linear of the base by logical name; `others` are modules without adapters,
    which may be excluded all the same. Raises SpecError for an entry that matches nothing (but `lm_head` may
    be excluded where there is none) and when no module is left.
    """
    if not shapes:
        raise SpecError(
            "there is no linear to put an adapter on", key="lora.target_modules", hint="use another model"
        )
    chosen = _matched(shapes, target_modules, "lora.target_modules")
    excluded = _matched(
        (*shapes, *others), exclude_modules, "lora.exclude_modules", may_lack=(HEAD, "output_layer")
    )
    if not chosen - excluded:
        raise SpecError(
            f"no module is left of {_shown(target_modules)} without {_shown(exclude_modules)}",
            key="lora.target_modules",
            hint=f"name other modules; there are {', '.join(_leaves(shapes))}",
        )
    return tuple(sorted(chosen - excluded))


def leaf(name: str) -> str:
    """Return `q_proj` of `model.layers.0.self_attn.q_proj`."""
    return name.rpartition(".")[2]


def in_layers(name: str) -> str:
    """Return what a linear's names share: `model.layers.0.mlp.up_proj` -> `layers.0.mlp.up_proj`."""
    match = _IN_LAYERS.search(name)
    return match[1] if match else name


def renamed(names: Iterable[str], base: Iterable[str]) -> dict[str, str]:
    """Return each name in `base`: itself, or the same linear's of the same layer behind another prefix.

    Tools and classes put different prefixes before `layers`. A name without a counterpart stays. Raises
    SpecError where two names of the base are alike behind the prefix.
    """
    present = set(base)
    alike: dict[str, list[str]] = {}
    for name in sorted(present):
        alike.setdefault(in_layers(name), []).append(name)
    result = {}
    for name in names:
        counterparts = [name] if name in present else alike.get(in_layers(name), [name])
        if len(counterparts) > 1:
            raise SpecError(
                f"{name} may be {counterparts[0]} or {counterparts[1]} of the base",
                key="model.path",
                hint="Give a checkpoint of the language model alone.",
            )
        result[name] = counterparts[0]
    return result


def experts_of(name: str) -> str:
    """Return a linear's experts: `layers.0.mlp.experts.3.up_proj` -> `layers.0.mlp.experts`; else ""."""
    match = _OF_EXPERT.fullmatch(name)
    return match[1] if match else ""


def entry_matches(entry: str, name: str) -> bool:
    """Return whether one entry, `all-linear` included, names the module `name`."""
    if entry == ALL_LINEAR:
        return leaf(name) != HEAD
    *path, last = entry.split(".")
    prefix = [_MEGATRON_PATH.get(part, part) if last in MEGATRON else part for part in path]
    for word in MEGATRON.get(last, (last,)):  # a fused linear of Megatron is several
        pattern = ".".join([*prefix, word])
        if _WILD & set(pattern):
            if fnmatchcase(name, pattern):
                return True
        elif name == pattern or name.endswith(f".{pattern}"):
            return True
    return False


def entries(modules: str | Sequence[str]) -> list[str]:
    """Return the entries of a list or of a comma string."""
    parts = modules.split(",") if isinstance(modules, str) else modules
    return [part.strip() for part in parts if part.strip()]


def _matched(
    shapes: Iterable[str], modules: str | Sequence[str], key: str, may_lack: tuple[str, ...] = ()
) -> frozenset[str]:
    names = list(shapes)
    matched: set[str] = set()
    for entry in entries(modules):
        matches = {name for name in names if entry_matches(entry, name)}
        if not matches and entry not in may_lack:
            leaves = _leaves(names)
            others = [name for name in (*leaves, *MEGATRON, ALL_LINEAR, *names) if name != entry]
            near = difflib.get_close_matches(entry, others, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            hint += f"there are {', '.join(leaves)}, Megatron's names for them, {ALL_LINEAR}, "
            hint += "and wildcards with *"
            if entry == ALL_LINEAR:
                hint = f"there is {HEAD} alone, which {ALL_LINEAR} leaves out: name it, or use another model"
            raise SpecError(f"{entry!r} matches no linear of the model", key=key, hint=hint)
        matched |= matches
    return frozenset(matched)


def _leaves(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(leaf(name) for name in names))


def _shown(modules: str | Sequence[str]) -> str:
    return ", ".join(entries(modules)) or "nothing"
