"""Chat templates, rendered by transformers in a process that ends when one takes too long or too much."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lorad.bounds import CONFIG_BYTES
from lorad.box.paths import python_path
from lorad.errors import SpecError
from lorad.files import read_file

Chat = Sequence[Mapping[str, Any]]
_AT_ONCE = 64  # chats in one request to the process
_COMMAND = [sys.executable, "-P", "-m", "lorad.rl.template_child"]


class ChatTemplate(Struct, frozen=True):
    """A chat template.

    tokens: The special tokens (`bos_token`, …) that it may name.
    seconds: The processor time that one chat may take.
    """

    template: str
    tokens: dict[str, str]
    seconds: float


class Job(Struct, frozen=True):
    """Chats to render.

    settings: Further variables of the template.
    own: The variables of each chat alone.
    date: What `strftime_now` says, in ISO 8601; None for the present.
    generate: Whether to end where the assistant begins to speak.
    continues: Whether chats that end with a turn of the assistant's end within it.
    """

    chats: list[list[dict[str, Any]]]
    settings: dict[str, Any]
    own: list[dict[str, Any]]
    date: str | None
    generate: bool = True
    continues: bool = False


class Rendered(Struct, frozen=True):
    """One chat as text, or why there is none; then the job ends."""

    text: str = ""
    error: str = ""


_ANSWERS = msgspec.json.Decoder(Rendered)  # made before there are threads


class Refused(Exception):
    """Chat number `index` has no text."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class Renderer:
    """One template, rendered by a process that starts with the first chat. Safe between threads."""

    def __init__(self, setup: ChatTemplate) -> None:
        self._setup = setup
        self.process: subprocess.Popen[bytes] | None = None
        self._busy = threading.Lock()

    def render(self, job: Job) -> list[str]:
        """Return each chat as text. Raises Refused for the first that has none."""
        texts: list[str] = []
        with self._busy:
            for start in range(0, len(job.chats), _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                request = replace(job, chats=job.chats[part], own=job.own[part])
                try:
                    line = msgspec.json.encode(request, enc_hook=str)
                except (UnicodeError, RecursionError) as error:
                    raise Refused(len(texts), f"its messages are no text: {error}") from None
                if (process := self.process) is None:
                    light = {"USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
                    light |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(os.environ.get("PYTHONPATH"))}
                    self.process = process = subprocess.Popen(
                        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | light
                    )
                    self._end = weakref.finalize(self, _end, process)
                    line = msgspec.json.encode(self._setup) + b"\n" + line
                assert process.stdin is not None and process.stdout is not None
                with contextlib.suppress(BrokenPipeError):  # one that is gone does not answer either
                    process.stdin.write(line + b"\n")
                    process.stdin.flush()
                for _ in request.chats:
                    if not (answer := process.stdout.readline()):
                        code = process.wait()
                        self._stop()
                        is_slow = code == -signal.SIGPROF
                        over = f"it takes over {self._setup.seconds:g} s"
                        raise Refused(len(texts), over if is_slow else f"its process ended with {code}")
                    rendered = _ANSWERS.decode(answer)
                    if rendered.error:
                        raise Refused(len(texts), rendered.error)
                    texts.append(rendered.text)
        return texts

    def close(self) -> None:
        """End the process; the next `render` starts another."""
        with self._busy:
            self._stop()

    def _stop(self) -> None:
        if self.process is not None:
            self._end()
            self.process = None


def has_chat_template(directory: Path) -> bool:
    """Return whether the `Tokenizer` of a directory would have a template. Raises SpecError."""
    return template_in(directory, settings_in(directory / "tokenizer_config.json")) is not None


def settings_in(path: Path) -> dict[str, Any]:
    """Read a JSON object of settings; empty when there is no such file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(read_file(path, CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"{path}: not readable: {why}", hint="download the model again") from error
    if not isinstance(data, dict):
        raise SpecError(f"{path}: not a JSON object", hint="download the model again")
    return data


def template_in(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the text of a model's template, from a file rather than the setting; `default` of several."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_file(path, CONFIG_BYTES).decode()
        except (OSError, ValueError) as error:
            raise SpecError(f"{path}: not readable: {error}", hint="download the model again") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child: kill it where this process may, else close its stdin, upon which it ends by itself."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()
