"""The adapter that a run starts from (lora.adapter_path): it supplies what the spec leaves open of `lora`."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from lorad.adapters.adapter import AdapterConfig
from lorad.adapters.peft import CONFIG, outline, read_peft
from lorad.adapters.prefixes import adapter_for, outline_for
from lorad.adapters.readers import refuse_interleaved
from lorad.adapters.targets import entries
from lorad.adapters.validate import refuse_unfit, validate
from lorad.backends.setup import lora_of, modules_of, served_experts, targets_of
from lorad.errors import AdapterRefused, SpecError
from lorad.files import expanded
from lorad.models.directory import weight_files
from lorad.models.facts import ModelFacts
from lorad.models.families import FUSED
from lorad.preflight.trainers import check_shared
from lorad.spec.model import Spec

_NAMES = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
_OPEN = ("rank", "alpha", "rslora", "dora", "dropout", "target_modules", "exclude_modules")


def supplied_spec(spec: Spec, model: ModelFacts, written: Mapping[str, str] | None, cwd: Path) -> Spec:
    """Return the spec with what it leaves open of `lora` as the adapter to start from has it.

    written: see SpecQuestion.

    Raises SpecError for an adapter that does not fit the base, and for every written key that contradicts it.
    """
    shapes = targets_of(spec.trainer.backend, model.linears, served_experts(spec.rollout.backend, model))
    try:
        outlined = outline_for(shapes, outline(source_of(spec, cwd)))
        refuse_interleaved(outlined, model.model_type, FUSED)
        refuse_unfit(outlined, shapes)
    except AdapterRefused as error:
        raise SpecError(error.message, key="lora.adapter_path", hint=error.hint) from error
    adapter = lora_of(spec.lora, outlined.config, shapes)
    own = {key for key in _OPEN if written is None or f"lora.{key}" in written}
    own |= {"exclude_modules"} if "target_modules" in own else set()
    own |= {"experts"} if spec.lora.experts.rank != "auto" else set()
    spec = replace(spec, lora=replace(adapter, **{key: getattr(spec.lora, key) for key in own}))
    wrong = []
    for key, name in _NAMES.items():
        own_value = getattr(spec.lora, key)
        supplied = getattr(adapter, key)
        if own_value != supplied:
            both = (own_value, supplied)
            words = [str(each).lower() if isinstance(each, bool) else f"{each:g}" for each in both]
            wrong.append(_contradiction(spec, key, f"{words[0]} here but {words[1]} in", name))
    rank = spec.lora.experts.rank
    if adapter.experts.rank not in (rank, "auto"):
        ranks = f"{rank} here but {adapter.experts.rank} in"
        wrong.append(_contradiction(spec, "experts.rank", ranks, "rank_pattern"))
    wrong += _other_modules(spec, outlined.config, model, own)
    errors = [error.at((written or {}).get(error.key, "")) for error in wrong]
    if errors:
        errors[0].others = tuple(errors[1:])
        raise errors[0]
    return spec


def _other_modules(
    spec: Spec, adapter: AdapterConfig, model: ModelFacts, own: set[str]
) -> Iterator[SpecError]:
    try:
        written = set(modules_of(spec, model))
        supplied = set(adapter.modules)
    except SpecError as unmatched:  # for an entry that names nothing
        yield unmatched
        return
    if differing := sorted(written ^ supplied):
        key = "target_modules" if "target_modules" in own else "exclude_modules"
        words = ", ".join(entries(getattr(spec.lora, key)))
        who = "the adapter" if differing[0] in written else f"lora.{key}"
        others = f"{len(differing)} others than the {len(supplied)} in"
        what = f"with {words} there are {len(written)} modules, {others}"
        error = _contradiction(spec, key, what, "target_modules")
        yield SpecError(f"{error.problem}: {who} lacks {differing[0]}", key=error.key, hint=error.hint)


def _contradiction(spec: Spec, key: str, what: str, name: str) -> SpecError:
    """Make the error of a key that says something else than `name` in the adapter's configuration."""
    hint = f"Leave lora.{key} out: it is then as the adapter has it."
    return SpecError(f"{what} {spec.lora.adapter_path}/{CONFIG} ({name})", key=f"lora.{key}", hint=hint)


def check_start(spec: Spec, model: ModelFacts, directory: Path, cwd: Path) -> None:
    """Check the weights of an adapter to start from. Raises SpecError. directory: the base's."""
    if spec.lora.adapter_path is None:
        return
    shapes = targets_of(spec.trainer.backend, model.linears, served_experts(spec.rollout.backend, model))
    try:
        adapter = adapter_for(shapes, read_peft(source_of(spec, cwd), weight_files(directory)))
        validate(adapter, shapes)
    except AdapterRefused as error:
        raise SpecError(error.message, key="lora.adapter_path", hint=error.hint) from error
    check_shared(spec, adapter)


@contextlib.contextmanager
def naming_adapter(spec: Spec, written: Mapping[str, str] | None) -> Iterator[None]:
    """Have an error of the block about a key of `lora` that nobody wrote say where its value is from."""
    try:
        yield
    except SpecError as error:
        is_open = error.key.removeprefix("lora.") in _OPEN and error.key not in (written or {error.key})
        if is_open and spec.lora.adapter_path is not None and not error.where:
            raise error.at(f"{spec.lora.adapter_path}/{CONFIG}") from error
        raise


def source_of(spec: Spec, cwd: Path) -> Path:
    return cwd / expanded(spec.lora.adapter_path or "")
