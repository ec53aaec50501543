"""Look at the directory of a model: its weight files, its linears to be rounded, its tokenizer."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from lorad.adapters.targets import HEAD
from lorad.errors import SpecError
from lorad.files import expanded, open_file, refuse_sparse
from lorad.models.directory import INDEX, indexed, resolve
from lorad.models.facts import ModelFacts, refuse_unfilled
from lorad.models.families import FUSED
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.model import Spec


def model_directory(path: str, cwd: Path, *, any_architecture: bool) -> Path:
    """Return the model's directory, like `resolve`, with relative paths from `cwd`."""
    local = cwd / expanded(path)
    place = str(local) if local.is_dir() and not path.startswith("builtin:") else path
    return resolve(place, any_architecture=any_architecture)


def check_blocks(spec: Spec, facts: ModelFacts) -> None:
    """Raise SpecError for linears that blocks do not fill, and for experts in tensors of all experts."""
    if spec.model.quantize and facts.model_type in FUSED:
        raise SpecError(
            f"{spec.model.quantize}, but the experts of {facts.model_type} lie in tensors of all experts, "
            "which lorad does not round",
            key="model.quantize",
            hint="Leave it out.",
        )
    if spec.model.quantize == "nf4":
        everything = {**facts.linears, **facts.experts}
        refuse_unfilled({name: shape for name, shape in everything.items() if name != HEAD})


def check_weights(directory: Path) -> None:
    """Raise SpecError for a weight file that is shorter than its header says or lacks what the index says."""
    for name, tensors in indexed(directory).items():
        path = directory / name
        try:
            with open_file(path) as file, safe_open(path, framework="np") as weights:
                refuse_sparse(file, path)
                absent = sorted({*tensors} - {*weights.keys()})
        except (SafetensorError, OSError) as error:
            why = getattr(error, "strerror", None) or error
            raise SpecError(
                f"{path} is damaged: {why}", key="model.path", hint="Download or copy it again."
            ) from None
        if absent:
            raise SpecError(
                f"{path} lacks {absent[0]}, and {len(absent)} of the {len(tensors)} tensors that {INDEX} "
                "says are in it",
                key="model.path",
                hint="It may be of another model, or of another download: download it again.",
            )


def checked_tokenizer(directory: Path) -> Tokenizer:
    """Return the model's tokenizer. Raises SpecError where what ends completions has no embedding."""
    tokenizer = Tokenizer(directory)
    tokenizer.refuse_unembedded(tokenizer.eos_ids, "model: what ends a completion")
    return tokenizer
