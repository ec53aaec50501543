"""What `lorad export` makes of a version: a whole model, or an adapter with a tokenizer and a model card."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from lorad import __version__
from lorad.adapters.directory import TEMPORARY, amend
from lorad.bounds import JSON_BYTES
from lorad.cli import output
from lorad.client.client import Client
from lorad.errors import Conflict, LoradError, SpecError
from lorad.files import read_file
from lorad.records.runs import RunDetails
from lorad.records.versions import Exported

if TYPE_CHECKING:
    from lorad.adapters.adapter import Adapter, AdapterConfig
    from lorad.adapters.directory import FileFact
    from lorad.models.merged_files import Merged

_CARD = "README.md"
_CONFIG = "adapter_config.json"
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"),
)
_MUCH = 0.1  # of an adapter, lost by rounding, from which a user should know


def add_beside(directory: Path, exported: Exported, run: RunDetails, *, tokenizer: bool) -> None:
    """Put a model card, and the base's tokenizer, beside an adapter that the caller just exported.

    A base that is not on this machine has its tokenizer left out, with a note. Raises StorageError.
    """
    from lorad.adapters.peft import outline

    settings = _settings(directory)
    config = outline(directory).config
    prefixes = {module.partition("layers.")[0] for module in config.modules if "layers." in module}
    loading = _LOAD_ADAPTER
    if prefixes - {"model."}:
        whole = any("language_model" in prefix for prefix in prefixes)
        loading = (_LOAD_WHOLE if whole else _LOAD_RENAMED) + _SERVERS
    text = card(exported, settings, run, loading)
    if settings.get("target_parameters"):
        text = text.replace(_SERVERS, "Servers read the version without `--format`.\n")
    elif sentence := _readers(config, settings):
        text += f"\n{sentence}\n"
        output.note(sentence)
    amend(directory, _CARD, text.encode())
    if not tokenizer:
        return
    try:
        base = base_directory(settings)
    except LoradError as error:
        output.note(f"Without the tokenizer: {error.message}.")
        return
    for name in _TOKENIZER:
        if (base / name).is_file():
            amend(directory, name, read_file(base / name, JSON_BYTES))


def _readers(config: "AdapterConfig", settings: Mapping[str, Any]) -> str:
    """Say who reads an adapter on a mixture as it was trained; "" of other adapters, and without its base."""
    from lorad.adapters.readers import taken_for_experts, why_not
    from lorad.models.facts import read_facts

    try:
        facts = read_facts(base_directory(settings))
    except LoradError:
        return ""
    if not config.experts:
        if linears := taken_for_experts(config, facts.model_type):
            return f"PEFT does not read it as it was trained: it takes {linears[0]} for experts{_MERGE}"
        return ""
    reasons = why_not(config, {**facts.linears, **facts.experts}, facts.model_type)
    exact = ", ".join(name for name, why in reasons.items() if not why) or "nobody"
    others = "".join(f" Not by {name}: {why}." for name, why in reasons.items() if why)
    return f"Its experts are read exactly by {exact}.{others}" + (_OTHER_WAYS if others else "")


def write_peft5(client: Client, version: str, target: Path) -> Exported:
    """Write `version` with its experts in PEFT's own form. Raises Conflict and what `refuse_fused` does."""
    from lorad.adapters.peft import write_fused
    from lorad.adapters.readers import refuse_fused
    from lorad.models.facts import read_facts

    copy = _copied(client, version, target)
    facts = read_facts(base_directory(copy.settings))
    refuse_fused(copy.adapter.config, facts.model_type)
    shapes = {**facts.linears, **facts.experts}
    return _written(copy, target, lambda directory: write_fused(copy.adapter, directory, copy.base, shapes))


def write_class_names(client: Client, version: str, target: Path) -> Exported:
    """Write `version` by the names of transformers' class of the language model alone. Raises Conflict."""
    from lorad.adapters.peft import write_peft
    from lorad.adapters.prefixes import adapter_for
    from lorad.adapters.targets import in_layers

    copy = _copied(client, version, target)
    names = map(in_layers, copy.adapter.config.modules)
    adapter = adapter_for(
        {f"model.{name}" if name.startswith("layers.") else name for name in names}, copy.adapter
    )
    return _written(copy, target, lambda directory: write_peft(adapter, directory, copy.base))


class _Copy(NamedTuple):
    """A version as it was exported, and what is needed to write it in another form."""

    exported: Exported
    settings: dict[str, Any]
    adapter: "Adapter"
    about: Mapping[str, Any]
    base: str


def _copied(client: Client, version: str, target: Path) -> _Copy:
    """Read a version by way of a directory beside `target`. Raises Conflict when `target` is not empty."""
    from lorad.adapters.directory import read_manifest
    from lorad.adapters.peft import read_peft

    with _beside(target) as temporary:
        exported = client.export(version, str(temporary))
        about = read_manifest(temporary).facts
        settings = _settings(temporary)
        base = str(settings["base_model_name_or_path"])
        return _Copy(exported, settings, read_peft(temporary, base=None), about, base)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Name a directory to work in, beside a target that is new or empty. Raises Conflict for any other."""
    from lorad.models.merged_files import free_of

    temporary = target.parent / f"{TEMPORARY}{target.name}-{uuid4().hex[:12]}"
    free_of(target)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _written(copy: _Copy, target: Path, write: Callable[[Path], dict[str, "FileFact"]]) -> Exported:
    from lorad.adapters.directory import write_directory

    write_directory(target, write, copy.about)
    if "revision" in copy.settings:
        settings = _settings(target) | {"revision": copy.settings["revision"]}
        amend(target, _CONFIG, json.dumps(settings, indent=2, sort_keys=True).encode() + b"\n")
    return Exported(copy.exported.version, str(target), copy.exported.sha256)


def merge(client: Client, version: str, target: Path) -> tuple[Exported, "Merged"]:
    """Write `version` added to its base as a whole model into `target`, which is new or empty.

    Raises what `write_merged` does, Conflict also where the base's weights are not those that the run was
    trained on, and SpecError for a version that was trained and served on rounded weights.
    """
    from lorad.adapters.peft import read_peft
    from lorad.models.facts import weights_sha256
    from lorad.models.merged_files import write_merged

    with _beside(target) as temporary:
        exported = client.export(version, str(temporary))
        settings = _settings(temporary)
        base = base_directory(settings)
        run = client.show(exported.version.rpartition("@")[0])
        if form := (run.spec.get("model") or {}).get("quantize"):
            raise SpecError(
                f"{run.name} was trained on its base rounded to {form}: added to the weights as they are in "
                "its files, the adapter would be another model than the one that was served",
                hint="Export without --merge, and serve the adapter with model.quantize as in the run.",
            )
        trained_on = run.begun.model_sha256 if run.begun is not None else ""
        if trained_on and weights_sha256(base) != trained_on:  # weights that take the adapter, too
            hint = f"Put the model back; `lorad verify {run.name}` says more."
            raise Conflict(f"the weights of {base} are not those that {run.name} was trained on", hint=hint)
        text = card(exported, settings, run, _LOAD_MODEL, is_merged=True)
        with _shown(f"merging {exported.version}") as progress:
            adapter = read_peft(temporary, base=None)
            merged = write_merged(adapter, base, target, lambda d: (d / _CARD).write_text(text), progress)
    if merged.rounding > _MUCH:
        output.note(
            f"Rounding to the base's dtype takes {merged.rounding:.0%} of what the adapter adds (rms). "
            "Served beside the base, the adapter loses none of it."
        )
    return Exported(exported.version, str(target), exported.sha256), merged


def base_directory(settings: Mapping[str, Any]) -> Path:
    """Return the directory of an exported adapter's base, perhaps in the hub's cache. Raises SpecError."""
    from lorad.models.directory import resolve

    name = settings.get("base_model_name_or_path")
    revision = settings.get("revision")
    if not isinstance(name, str) or not name:
        raise SpecError("the adapter names no base", hint="Export without --merge.")
    return resolve(f"{name}@{revision}" if revision else name, any_architecture=True)


def card(
    exported: Exported, adapter: Mapping[str, Any], run: RunDetails, loading: str, *, is_merged: bool = False
) -> str:
    """Return a model card in the form of the hub: a YAML header, and what a reader has to know.

    adapter: its `adapter_config.json`.
    loading: how readers load it, as text of the card.
    """
    from yaml import safe_dump

    base = str(adapter.get("base_model_name_or_path", ""))
    number = exported.version.rpartition("@")[2]
    results = []
    for result in run.results:
        if str(result.version) == number and "score" in result.metrics:
            results.append(f"{result.data}: {result.metrics['score']:.3f}")
    held_out = run.eval_last if number == str(run.version) else None
    train = (run.spec.get("data") or {}).get("train")
    sources = [train] if isinstance(train, str) else map(str, train or ())
    names = [Path(name).name if name.startswith(("/", ".", "~")) else name for name in sources]
    is_hub_id = base.count("/") == 1 and not base.startswith(("/", ".", "~"))
    header = {
        "library_name": "transformers" if is_merged else "peft",
        **({"base_model": base} if is_hub_id else {}),
        "tags": ["lora", "lorad"],
    }
    about = {
        "base": base.rpartition("/")[2] if base.startswith("/") else base,
        "rank": adapter.get("r"),
        "alpha": adapter.get("lora_alpha"),
        "targets": ", ".join(adapter.get("target_modules") or []),
        "algorithm": (run.spec.get("algorithm") or {}).get("name"),
        "trained on": ", ".join(names),  # without the directories of this machine
        "held-out reward": "" if held_out is None else f"{held_out:.3f}",
        "evaluated": ", ".join(results),
        "sha256 of the adapter": exported.sha256,
        "made by": f"lorad {__version__}",
    }
    rows = ""
    for key, value in about.items():
        if value not in (None, ""):
            cell = str(value).replace("|", "\\|").replace("\n", " ")
            rows += f"| {key} | {cell} |\n"
    kind = "A base with a LoRA adapter merged into its weights" if is_merged else "A LoRA adapter"
    return (
        f"---\n{safe_dump(header, sort_keys=False)}---\n\n"
        f"# {exported.version}\n\n{kind}, trained with lorad.\n\n"
        f"| | |\n|---|---|\n{rows}\n## Loading it\n\n{loading}"
    )


_LOAD_ADAPTER = """```python
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained("THIS DIRECTORY")
```

"""
_SERVERS = """vLLM: `vllm serve BASE --enable-lora --lora-modules NAME=DIRECTORY --max-lora-rank RANK`.
SGLang: `python -m sglang.launch_server --model-path BASE --enable-lora --lora-paths NAME=DIRECTORY`.
"""
_LOAD_ADAPTER += _SERVERS
_LOAD_WHOLE = """```python
import transformers
from peft import PeftModel
kind = getattr(transformers, transformers.AutoConfig.from_pretrained("BASE").architectures[0])
model = PeftModel.from_pretrained(kind.from_pretrained("BASE"), "THIS DIRECTORY")
```

Its names are those of this class. In that of the language model alone they may name nothing, of which PEFT
may only warn: for it there is `lorad export --names class`.

"""
_LOAD_RENAMED = """Its names are those of the base's file, which PEFT does not find in transformers' class:
`lorad export --names class` writes a copy for it.

"""
_MERGE = ". --merge writes a model; lorad and servers read the adapter."
_OTHER_WAYS = (
    " `lorad serve` gives servers a form that they read, --format peft5 writes one for PEFT, --merge a model."
)
_LOAD_MODEL = """```python
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("THIS DIRECTORY", dtype="auto")
```

vLLM: `vllm serve DIRECTORY`. SGLang: `python -m sglang.launch_server --model-path DIRECTORY`.
"""


def _settings(directory: Path) -> dict[str, Any]:
    try:
        settings = json.loads(read_file(directory / _CONFIG, JSON_BYTES))
    except (ValueError, RecursionError):
        settings = None
    return settings if isinstance(settings, dict) else {}


@contextmanager
def _shown(what: str) -> Iterator[Any]:
    """Show how far long work is, where somebody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
