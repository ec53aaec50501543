"""The weights of a sharded model: each rank reads its own rows, so that the whole model is in no memory."""

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lorad.adapters.targets import HEAD, in_layers, renamed
from lorad.errors import SpecError
from lorad.models.base import add_to
from lorad.models.facts import is_left_out, stored_tensors
from lorad.models.hf.opening import auto_class
from lorad.models.packed import pack
from lorad.protocol.pool_setup import Quantize
from lorad.trainers.fsdp import experts
from lorad.trainers.fsdp.adapter import is_adapter
from lorad.trainers.fsdp.experts import Part

log = logging.getLogger("lorad.fsdp")


class Rounding(NamedTuple):
    """Rounds the named linears to the grid of a narrow format, as builtin does; without a form none."""

    form: Quantize | None
    linears: Collection[str]

    def whole(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a linear's weight in this dtype, rounded whole: a block of numbers may reach over rows."""
        return stored if self.form is None else pack(stored, self.form, dtype, stored.device).dense()

    def takes(self, name: str) -> bool:
        return self.form is not None and name.removesuffix(".weight") in self.linears


def fill(
    model: Any, mixtures: Mapping[str, Any], directory: Path, device: torch.device, rounding: Rounding
) -> None:
    """Allocate this rank's shards of a model on the meta device and fill them. Collective.

    The linears of `mixtures`, modules of experts (see `experts.experts_in`), are stored one by one. Raises
    SpecError where the files do not have exactly the model's tensors, or not by the modules' names although
    the base is to be rounded.
    """
    derived = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    if not isinstance(model, FSDPModule):  # which keeps tied weights tied
        model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.copy_(derived[name])
    files = {name: path for name, (path, _) in stored_tensors(directory).items()}
    # transformers fuses or renames the tensors of some architectures, which cannot be copied as they are
    parts = experts.parts_of(mixtures)
    fused = {part.name for part in parts.values()}
    is_whole = all(name in files for name in parts)
    names = _names_in_files(model, files)
    has_all = all(stored in files or name in fused for name, stored in names.items())
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping as steps_of
        from transformers.core_model_loading import WeightConverter
    except ImportError:  # before transformers 5 modules are stored as they are
        converts = False
    else:
        converts = not parts and any(isinstance(step, WeightConverter) for step in steps_of(model))
    if not converts and is_whole and has_all:
        log.info("every rank reads its own rows of %s", directory)
        _read_rows(model, files, names, parts, rounding)
    elif rounding.form is not None:
        raise SpecError(
            f"{rounding.form}: names in {directory} are not those of the modules, and fsdp rounds none",
            key="model.quantize",
            hint="use trainer.backend: builtin, or leave it out",
        )
    else:
        log.info(
            "names in %s are not those of the modules: rank 0 reads all of it, the others get their rows",
            directory,
        )
        _receive_rows(model, directory, device)


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the base's tensors that a checkpoint holds, without adapters, once each by the names there."""
    transient = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not is_adapter(name) and name not in transient:
            yield name.replace(".base_layer.", "."), tensor


def checksum(model: nn.Module) -> str:
    """Return the sha256 over names, shapes and numbers of the parts that this rank holds."""
    digest = hashlib.sha256()
    for name, tensor in weights(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        add_to(digest, _local(tensor))
    return digest.hexdigest()


def _names_in_files(model: nn.Module, files: Collection[str]) -> dict[str, str]:
    """Return the files' names of a model's tensors, which differ by one prefix at most."""
    read = [name for name in files if not is_left_out(name, 0)]
    names = renamed((name for name, _ in weights(model)), read)
    prefixes = {
        (name.removesuffix(tail), stored.removesuffix(tail))
        for name, stored in names.items()
        if (tail := in_layers(name)) != name and not tail.startswith(HEAD)
    }
    if len(prefixes) != 1:
        return names
    prefix = prefixes.pop()
    beside = [name for name in names if names[name] not in files and name.startswith(prefix[0])]
    return names | {name: prefix[1] + name.removeprefix(prefix[0]) for name in beside}


@torch.no_grad()
def _read_rows(
    model: nn.Module,
    files: dict[str, Path],
    names: Mapping[str, str],
    parts: Mapping[str, Part],
    rounding: Rounding,
) -> None:
    parameters = dict(weights(model))
    stored = {names[name]: tensor for name, tensor in parameters.items()}
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name in parts:
                    _read_part(file, path, name, parts[name], parameters[parts[name].name], rounding)
                elif name in stored:
                    _read(file, path, name, stored[name], rounding)
    unread = sorted(set(files) - set(stored) - set(parts))
    if unread:
        log.info(
            "%d tensors have no place in the model and were not read: %s", len(unread), ", ".join(unread[:3])
        )


def _read(file: Any, path: Path, name: str, into: Tensor, rounding: Rounding) -> None:
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != tuple(into.shape):
        raise SpecError(
            f"{path}: {name} has shape {tuple(stored.get_shape())}, config.json says {tuple(into.shape)}",
            hint="the weights and config.json belong to different models",
        )
    local = _local(into)
    if not local.numel():
        return
    if rounding.takes(name):
        local.copy_(rounding.whole(file.get_tensor(name), into.dtype)[_rows(into)])
    else:
        local.copy_(stored[_rows(into)] if into.dim() else file.get_tensor(name))


def _read_part(file: Any, path: Path, name: str, part: Part, into: Tensor, rounding: Rounding) -> None:
    """Read one linear of one expert, if this rank has the expert."""
    rows = _rows(into)
    if not rows.start <= part.expert < rows.stop:
        return
    place = _local(into)[part.expert - rows.start][part.rows]
    stored = file.get_tensor(name)
    if stored.shape != place.shape:
        raise SpecError(
            f"{path}: {name} has shape {tuple(stored.shape)}, config.json says {tuple(place.shape)}",
            hint="the weights and config.json belong to different models",
        )
    place.copy_(rounding.whole(stored, into.dtype))


def _receive_rows(model: nn.Module, directory: Path, device: torch.device) -> None:
    """Have rank 0 load as transformers does, and send the others one tensor at a time."""
    whole: dict[str, Tensor] = {}
    failure = ""
    if dist.get_rank() == 0:
        try:
            loaded, report = auto_class(model.config).from_pretrained(
                directory,
                dtype=model.dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            if report["missing_keys"]:
                names = sorted(report["missing_keys"])
                raise SpecError(f"no tensor {', '.join(names[:3])}", hint="complete the download")
            whole = {name: tensor.detach() for name, tensor in weights(loaded)}
        except (SpecError, ValueError, OSError, RuntimeError) as error:
            failure = " ".join(str(error).split())[:500]
    is_fine = torch.tensor([int(not failure)], device=device)
    dist.broadcast(is_fine, 0)
    if not is_fine.item():
        raise SpecError(
            f"{directory}: {failure or 'rank 0 could not load it'}", hint="check that the model is whole"
        )
    for name, tensor in weights(model):
        shown = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if whole:
            shown.copy_(whole.pop(name))
        dist.broadcast(shown, 0)
        with torch.no_grad():
            _local(tensor).copy_(shown[_rows(tensor)] if tensor.dim() else shown)


def _rows(tensor: Tensor) -> slice:
    """Return which rows of the whole tensor this rank holds: FSDP2 cuts as `torch.chunk` does."""
    count = tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return slice(0, count)
    share = -(-count // tensor.device_mesh.size())
    begin = min(share * tensor.device_mesh.get_local_rank(), count)
    return slice(begin, min(begin + share, count))


def _local(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
