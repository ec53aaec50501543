"""The quickest form of each product on this machine, measured once and kept for all pools after this one.

A file is for one kind of CPU, version of torch and number of threads. It has an identity of its own, which
journals keep: as long as it is the same, all products have the forms that they had, and a resume computes the
same bits. Where the file cannot be kept, the rule of lorad/models/products/forms.py counts.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from lorad.box.machine import cpu_facts
from lorad.box.paths import cache_directory
from lorad.files import read_file, write_whole
from lorad.models.products.forms import FORMS, Form, Shape, by_rule, choose_by, forms_of

log = logging.getLogger(__name__)
_MOST_ROWS = 1024  # beyond, the form of so many rows counts
_FILE_BYTES = 4 << 20
_NUMBERS = 1 << 24  # at most, in the weights that are measured: no cache holds them
_MULTIPLICATIONS = 1 << 31  # at most, in a product that is measured
_ROUNDS = 7  # at most, for one shape
_SECONDS = 0.1  # at most, for one shape
_MARGIN = 0.93  # of the time of the rule's form: less is noise
_CPU = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags")


def measure_products(base_bytes: int) -> str:
    """Have this process compute products in the forms that are quickest on this machine; returns the identity
    of the choices, "" where the rule counts.

    Args:
        base_bytes: The size of the base, of which a pass reads every weight before it reads one again.
    """
    try:
        choices = Choices(cache_directory() / "products", base_bytes)
    except OSError as error:  # as for a user without a home, in containers
        log.info("products have the forms of a rule: nothing can be kept in %s", error.filename)
        return ""
    choose_by(choices)
    return choices.identity


class _File(Struct, frozen=True):
    """The content of a file of choices.

    Attributes:
        identity: See `Choices`.
        machine: What it was measured on, for a reader.
        forms: The quickest form by shape, as `64x3072x576` for rows, out and in, with a t where the weight
            is turned.
    """

    identity: str
    machine: dict[str, str]
    forms: dict[str, Form] = {}


class Choices:
    """Chooses forms by what was measured. Its `identity` changes when forms may have changed."""

    def __init__(self, directory: Path, base_bytes: int) -> None:
        """Read the file of this machine, or begin it.

        Raises OSError where the file cannot be kept.

        Args:
            directory: Where the files of all kinds of machines are.
            base_bytes: See `measure_products`.
        """
        machine = machine_of(torch.get_num_threads())
        digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
        self._path = directory / f"{digest}.json"
        self._base_bytes = base_bytes
        self._forms: dict[Shape, Form] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            try:
                content = msgspec.json.decode(read_file(self._path, _FILE_BYTES), type=_File)
            except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
                shown = {name: value for name, value in machine.items() if name != "flags"}
                content = _File(secrets.token_hex(4), shown)
                self._keep(content)
        self.identity = content.identity

    def __call__(self, shape: Shape) -> Form:
        rows = shape.rows if shape.rows <= 4 else min(_MOST_ROWS, 1 << (shape.rows - 1).bit_length())
        shape = shape._replace(rows=rows)
        if (form := self._forms.get(shape)) is None:
            form = self._forms[shape] = self._chosen(shape)
        return form

    def _chosen(self, shape: Shape) -> Form:
        """Choose a form for good: what another process has kept, else what is measured now."""
        name = f"{shape.rows}x{shape.out}x{shape.into}{'t' if shape.is_turned else ''}"
        try:
            with self._locked():
                content = msgspec.json.decode(read_file(self._path, _FILE_BYTES), type=_File)
                if content.identity != self.identity or name in content.forms:
                    return content.forms.get(name, by_rule(shape))
                form = quickest(seconds_of(shape, self._base_bytes), by_rule(shape))
                self._keep(msgspec.structs.replace(content, forms=content.forms | {name: form}))
                return form
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be kept (%s): %s goes by the rule", self._path, error, name)
            return by_rule(shape)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from measuring and writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(self._path.with_suffix(".lock"), flags, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _keep(self, content: _File) -> None:
        write_whole(self._path, msgspec.json.format(msgspec.json.encode(content)), durable=False)


def machine_of(threads: int) -> dict[str, str]:
    """Describe what the speed of a product depends on."""
    cpu = {name: value for name, value in cpu_facts().items() if name in _CPU}
    switches = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
    cpu |= {name: os.environ[name] for name in switches if name in os.environ}
    capability = torch.backends.cpu.get_cpu_capability()
    of_torch = {"capability": capability, "torch": str(torch.__version__), "threads": str(threads)}
    return {"machine": platform.machine(), **cpu, **of_torch}


def quickest(seconds: Mapping[Form, float], rule: Form) -> Form:
    """Return the form that took the least time; the form of the rule where that took hardly more."""
    best = min(seconds, key=lambda form: seconds[form])
    return rule if seconds[rule] * _MARGIN <= seconds[best] else best


def seconds_of(shape: Shape, base_bytes: int) -> dict[Form, float]:
    """Return the least time of several that each form of a product takes, measured in turns.

    There are several weights, up to the size of the base, so that they come from where they come from in a
    pass over all of it. What would take seconds is measured on a part.
    """
    out = min(shape.out, _NUMBERS // shape.into)
    rows = min(shape.rows, max(64, _MULTIPLICATIONS // (out * shape.into)))
    count = max(1, min(base_bytes // 4, _NUMBERS) // (out * shape.into))
    weights = torch.full((count, shape.into, out), 0.01)
    x = torch.full((rows, shape.into), 0.01)
    forms = forms_of(rows)
    seconds: dict[Form, list[float]] = {form: [] for form in forms}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    end = time.monotonic() + _SECONDS
    number = 0
    with torch.no_grad():
        for turn in range(_ROUNDS):
            if turn > 1 and time.monotonic() > end:
                break
            for form in forms:
                weight: Tensor = weights[number % count]
                weight = weight.t() if shape.is_turned else weight.view(out, shape.into)
                began = clock()
                FORMS[form](x, weight, None)
                seconds[form].append(clock() - began)
                number += 1
    # the first turn compiles programs
    return {form: min(times[1:]) for form, times in seconds.items()}
