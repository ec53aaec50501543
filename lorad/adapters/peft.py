"""Adapters as PEFT directories: `adapter_model.safetensors` and `adapter_config.json`.

What is written loads in peft, SGLang and vLLM. What is read is refused unless it means exactly one `Adapter`:
servers load adapters with wrong ranks, missing halves or unknown parts without a word and then answer with
the wrong model.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from reprlib import repr as short
from typing import Any

from msgspec.structs import replace

from lorad.adapters.adapter import MAGNITUDE, PEFT_PREFIX, Adapter, AdapterConfig, Outline
from lorad.adapters.directory import FileFact
from lorad.adapters.forms import form_of
from lorad.adapters.fused import is_fused, joined, pairs_of, split, split_shapes
from lorad.adapters.patterns import Pattern, patterns_of
from lorad.adapters.settings import read_settings
from lorad.adapters.targets import HEAD, Named, entry_matches, experts_of, leaf
from lorad.adapters.tensors import find_tensor, read_shapes, read_tensors, same_values
from lorad.errors import AdapterRefused

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_COPY = ".base_layer.weight"
_OF_TRAINING = ".lora_velora_embed"  # what VeLoRA's backward pass compresses with
# whose weight lm_head has, where it has none of its own
_TIED = ("model.embed_tokens", "embed_tokens", "transformer.wte")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_KEY = re.compile(rf"(?P<module>.+)\.(?P<part>lora_[AB]\.weight|{MAGNITUDE})")
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_BESIDE_TOWERS = "model.language_model."  # in a class whose towers have linears with the same leaf names

_SHARED = (
    "an A or B that experts share (shared_outer) is not read: save a pair of each expert, or PEFT's own form"
)


def write_peft(
    adapter: Adapter, directory: Path, base_model: str, called: Mapping[str, str] | None = None
) -> dict[str, FileFact]:
    """Write the two files of `adapter` into an existing directory; return their facts for `write_directory`.

    base_model: The model on which users load it.
    called: The names in target_modules by leaf name, where a reader has other names for linears than for
        tensors.
    """
    settings = _config(adapter.config, base_model)
    leaves = {leaf(module) for module in adapter.config.modules}
    if called and leaves & called.keys():
        settings = {**settings, "target_modules": sorted({called.get(name, name) for name in leaves})}
    return _write(adapter, directory, settings)


def write_fused(
    adapter: Adapter, directory: Path, base_model: str, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, FileFact]:
    """Write `adapter`, its experts in PEFT's own form (see `fused.py`); `shapes` has the base's (out, in)."""
    tensors, settings = joined(adapter, shapes)
    dense = tuple(module for module in adapter.config.modules if not experts_of(module))
    config = _config(replace(adapter.config, modules=dense), base_model)
    return _write(Adapter(adapter.config, tensors), directory, {**config, **settings})


def _write(adapter: Adapter, directory: Path, settings: Mapping[str, Any]) -> dict[str, FileFact]:
    config = json.dumps(settings, indent=2, sort_keys=True).encode() + b"\n"
    with (directory / WEIGHTS).open("wb") as file:
        file.writelines(adapter.parts())
        size = file.tell()
    (directory / CONFIG).write_bytes(config)
    sha256 = hashlib.sha256(config).hexdigest()
    return {WEIGHTS: FileFact(adapter.digest(), size), CONFIG: FileFact(sha256, len(config))}


def outline(directory: Path) -> Outline:
    """Read the outline of a PEFT directory.

    Raises AdapterRefused, with file, part and way out, for pickled weights, variants of LoRA, damaged files,
    ranks that contradict the configuration, and modules that lack a half or a layer.
    """
    weights = _weights(directory)
    settings = read_settings(directory / CONFIG)
    shapes = read_shapes(weights)
    copies = tuple(
        sorted(name.removeprefix(PEFT_PREFIX).removesuffix(_COPY) for name in shapes if name.endswith(_COPY))
    )
    named = {}
    for name, shape in shapes.items():
        if not name.endswith((_COPY, _OF_TRAINING)):
            if not name.startswith(PEFT_PREFIX) or not _KEY.fullmatch(name):
                kind, hint = form_of(name)
                raise AdapterRefused(f"{weights}: {name:.200} {kind}", hint=hint)
            named[name.removeprefix(PEFT_PREFIX)] = shape
    modules = _whole_modules(named, directory, dora=bool(settings.get("use_dora")))
    ranks = _pattern(settings, "rank_pattern", int, directory)
    alphas = _pattern(settings, "alpha_pattern", int | float, directory)
    with _refused(directory / CONFIG):
        pairs = pairs_of(named, settings, ranks, alphas)
    single = tuple(module for module in modules if not is_fused(module))
    named_by_config = _named(single, settings, directory)
    singles = {name: shape for name, shape in named.items() if not is_fused(name.rpartition(".lora_")[0])}
    config = _config_of(single, singles, settings, (ranks, alphas), directory)
    if pairs:
        if (inner := {pair.rank for pair in pairs}) != {pairs[0].rank} or config.experts:
            why = (
                f"ranks {sorted(inner)}" if len(inner) > 1 else "pairs of single experts beside others of all"
            )
            raise AdapterRefused(
                f"{directory / WEIGHTS}: its experts have {why}",
                hint="train gate_up_proj and down_proj at one rank, in PEFT's own form alone",
            )
        linears = {
            pair.name(expert, linear)
            for pair in pairs
            for expert in range(pair.total)
            for linear in pair.linears
        }
        modules = tuple(sorted({*config.modules, *linears}))
        config = replace(config, modules=modules, expert_rank=pairs[0].rank)
        singles |= {name: shape for pair in pairs for name, shape in split_shapes(pair, named).items()}
    if config.dora and config.experts:
        raise AdapterRefused(
            f"{directory / CONFIG}: use_dora on experts ({config.experts[0]})",
            hint="DoRA is computed on linears beside the experts alone; train without use_dora",
        )
    _check_used(config, settings, (ranks, alphas), directory)
    return Outline(config, singles, copies, tuple(pairs), named_by_config)


def read_peft(directory: Path, base: Sequence[Path] | None = ()) -> Adapter:
    """Return the adapter of a PEFT directory, upcast to fp32.

    Raises AdapterRefused as `outline` does, and for a copy of a base's weight that differs from the base's.

    base: The model's weight files; None where copies of them were compared before.
    """
    outlined = outline(directory)
    if base is not None:
        for module in outlined.copies:
            # a copy that is not the base's own weight would change the base itself
            names = [f"{module}.weight"] + [f"{tied}.weight" for tied in _TIED if leaf(module) == HEAD]
            copy = f"{PEFT_PREFIX}{module}{_COPY}"
            try:
                places = [(path, name) for name in names if (path := find_tensor(base, name))]
                is_own = bool(places) and same_values(directory / WEIGHTS, copy, *places[0])
            except OSError as error:
                raise AdapterRefused(
                    f"{error.filename}: not readable: {error.strerror}", hint="check its mode"
                ) from error
            if not is_own:
                why = "is not that of the base" if places else "is a weight of a base that is not known here"
                raise AdapterRefused(
                    f"{directory / WEIGHTS}: {copy} {why}",
                    hint="only adapters are loaded, never weights of the base: train with these frozen, and "
                    "save with save_pretrained(…, save_embedding_layers=False)",
                )
    fused = {f"{pair.module}.lora_{half}.weight" for pair in outlined.fused for half in "AB"}
    tensors = read_tensors(directory / WEIGHTS, {PEFT_PREFIX + name for name in (*outlined.shapes, *fused)})
    named = {name.removeprefix(PEFT_PREFIX): array for name, array in tensors.items()}
    with _refused(directory / WEIGHTS):
        apart = [split(pair, named) for pair in outlined.fused if fused <= named.keys()]
    named = {name: array for part in (named, *apart) for name, array in part.items() if name not in fused}
    if {name: array.shape for name, array in named.items()} != outlined.shapes:
        raise AdapterRefused(f"{directory / WEIGHTS}: it was changed while it was read", hint="try again")
    return Adapter(config=outlined.config, tensors={name: named[name] for name in sorted(named)})


@cache
def _config(config: AdapterConfig, base_model: str) -> Mapping[str, Any]:
    """Return the PEFT configuration, whose targets are leaf names, or full names where these mean others too.

    Leaf names serve for layers 0 to n - 1 of a model without towers whose layers all have the same modules.
    """
    modules = config.modules
    numbers = {match.group() for module in modules if (match := _LAYER.search(module))}
    is_even = {int(number) for number in numbers} == set(range(len(numbers)))
    leaves = sorted({leaf(module) for module in modules})
    kinds = {_LAYER.sub("*", module): module for module in modules}.values()
    everywhere = {_LAYER.sub(number, module) for module in kinds for number in numbers} | set(modules)
    named = {module for module in everywhere if any(entry_matches(name, module) for name in leaves)}
    is_exact = named == {*modules} and not any(module.startswith(_BESIDE_TOWERS) for module in modules)
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": leaves if is_even and is_exact else list(modules),
        "task_type": "CAUSAL_LM",
        "use_dora": config.dora,
        "use_rslora": config.rslora,
        **patterns_of(config),
    }


def _weights(directory: Path) -> Path:
    """Return the file of the weights. Raises AdapterRefused for pickles in its place and links to elsewhere.

    A link may lead to a file below the directory or, in a snapshot of the hub's cache, to its blobs.
    """
    for link in (path for path in (directory / CONFIG, directory / WEIGHTS) if path.is_symlink()):
        home = directory.resolve()
        target = link.resolve()
        cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
        if not (target.is_relative_to(home) or target.is_relative_to(cache)):
            raise AdapterRefused(
                f"{link}: a link that leads out of the directory", hint=f"replace it by a copy of {target}"
            )
    path = directory / WEIGHTS
    others = directory.iterdir() if directory.is_dir() and not os.path.lexists(path) else ()
    # what torch and its checkpoints unpickle
    if pickles := sorted(each.name for each in others if each.suffix in PICKLES or each.name == ".metadata"):
        raise AdapterRefused(
            f"{directory / pickles[0]}: pickled weights are never read, they could run code",
            hint=f"load it with peft and save_pretrained(safe_serialization=True), which writes {WEIGHTS}",
        )
    return path


def _whole_modules(tensors: Iterable[str], directory: Path, *, dora: bool) -> tuple[str, ...]:
    """Return the modules. Raises AdapterRefused unless each has all of its parts and no others."""
    parts: dict[str, set[str]] = {}
    for name in tensors:
        match = _KEY.fullmatch(name)
        assert match is not None
        parts.setdefault(match["module"], set()).add(match["part"])
    if not parts:
        raise AdapterRefused(f"{directory / WEIGHTS}: it holds no tensor", hint="export the adapter again")
    needed = {"lora_A.weight", "lora_B.weight", *([MAGNITUDE] if dora else [])}
    for module, present in sorted(parts.items()):
        for part in sorted(needed ^ present):
            what = "is missing" if part in needed else f"is there, but {CONFIG} has no use_dora: true"
            raise AdapterRefused(
                f"{directory / WEIGHTS}: {module}.{part} {what}", hint="export the adapter again"
            )
    return tuple(sorted(parts))


def _config_of(
    modules: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any],
    patterns: tuple[Pattern, Pattern],
    directory: Path,
) -> AdapterConfig:
    """Return the configuration by both files.

    Raises AdapterRefused unless there is one alpha, one rank for linears of experts and one for all others.
    """
    rank_of: dict[bool, int] = {}  # by whether it is of experts
    ranks, alphas = patterns
    alpha = settings["lora_alpha"]
    for module in modules:
        rank = ranks.of(module, settings["r"])
        is_expert = bool(experts_of(module))
        for half, axis in (("A", 0), ("B", 1)):
            name = f"{module}.lora_{half}.weight"
            shape = shapes[name]
            if len(shape) != 2 or shape[axis] != rank:
                raise AdapterRefused(
                    f"{directory / WEIGHTS}: {name} has shape {list(shape)} but {CONFIG} says r = {rank}",
                    hint=_SHARED
                    if len(shape) == 3
                    else "the two files are not of the same adapter: export it again",
                )
        if rank_of.setdefault(is_expert, rank) != rank:
            raise AdapterRefused(
                f"{directory / CONFIG}: {module} has rank {rank}, others have {rank_of[is_expert]}",
                hint="experts may have another rank than other linears, but each of the two kinds has one",
            )
        if alphas.of(module, alpha) != alpha:
            raise AdapterRefused(
                f"{directory / CONFIG}: alpha_pattern gives {module} another alpha than lora_alpha {alpha}",
                hint="one alpha holds for all modules; train without alpha_pattern",
            )
    return AdapterConfig(
        rank=rank_of.get(False, settings["r"]),
        alpha=float(alpha),
        modules=modules,
        rslora=bool(settings.get("use_rslora")),
        dropout=float(settings.get("lora_dropout") or 0.0),
        expert_rank=rank_of.get(True),
        dora=bool(settings.get("use_dora")),
    )


def _check_used(
    config: AdapterConfig, settings: Mapping[str, Any], patterns: tuple[Pattern, Pattern], directory: Path
) -> None:
    """Refuse keys of patterns that name nothing, except lorad's own for other versions of transformers.

    PEFT passes over them; where it joins experts they may mean another rank.
    """
    own = patterns_of(config)
    if not config.experts:
        return
    for key, pattern in zip(("rank_pattern", "alpha_pattern"), patterns, strict=True):
        for name in set(pattern.keys) - pattern.used:
            if own.get(key, {}).get(name) != settings[key][name]:
                raise AdapterRefused(
                    f"{directory / CONFIG}: {key} names {name}, which is no module of the adapter",
                    hint="export the adapter again",
                )


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Raise AdapterRefused, about a file, for a ValueError of the block."""
    try:
        yield
    except ValueError as error:
        raise AdapterRefused(
            f"{path}: {error}",
            hint="lorad reads target_parameters experts.gate_up_proj and experts.down_proj",
        ) from error


def _pattern(settings: Mapping[str, Any], key: str, kind: Any, directory: Path) -> Pattern:
    table = settings.get(key) or {}
    values = table.values() if isinstance(table, dict) else [None]
    if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
        raise AdapterRefused(f"{directory / CONFIG}: {key} is no mapping to numbers", hint="export it again")
    try:
        return Pattern(table)
    except ValueError as error:
        raise AdapterRefused(
            f"{directory / CONFIG}: {key}: {error} is no name of modules that is read here",
            hint=r"name modules as q_proj, model.layers.0.self_attn.q_proj or experts\.\d+\.\w+",
        ) from error


def _named(modules: tuple[str, ...], settings: Mapping[str, Any], directory: Path) -> Named:
    """Return what the configuration names. Raises AdapterRefused for a tensor of another module."""
    lists = [settings.get("target_modules"), settings.get("exclude_modules") or []]
    targets, excluded = (frozenset(map(str, each)) if isinstance(each, list) else None for each in lists)
    layers = settings.get("layers_to_transform")
    numbers = [layers] if isinstance(layers, int) else layers or []
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise AdapterRefused(
            f"{directory / CONFIG}: layers_to_transform is no list of numbers",
            hint="export the adapter again",
        )
    named = Named(targets, excluded, frozenset(numbers) if numbers else None)
    if others := [module for module in modules if not named.may_have(module)]:
        raise AdapterRefused(
            f"{directory / WEIGHTS}: {others[0]} is there but not in target_modules {short(lists[0])}",
            hint="PEFT would leave it out: export the adapter again",
        )
    return named
