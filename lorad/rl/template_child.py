"""The process that renders one chat template as transformers does: `python -m lorad.rl.template_child`.

JSON lines: a ChatTemplate, then Jobs, each answered by one Rendered for each chat. Processor time for each
chat is limited by the kernel, which ends the process, as a template that loops holds the interpreter. Nothing
here loads torch.
"""

import importlib.metadata
import importlib.util
import inspect
import os
import resource
import signal
import sys
from datetime import datetime
from types import ModuleType
from typing import Any

from lorad.startup import quick_imports

with quick_imports():
    import msgspec

    from lorad.bounds import GIB, MIB, TEMPLATE_MEMORY, TEMPLATE_TEXT
    from lorad.rl.templates import ChatTemplate, Job, Rendered

_ERROR_LIMIT = 2000  # characters


def _import_tokenizers() -> tuple[Any, ModuleType]:
    """Import transformers' PreTrainedTokenizerBase, and its module that renders.

    The package's own `__init__` reads the source of every model: more than half of the time that this process
    needs to start. It is left out, unless the installed version cannot do without it.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is not None:
        package = importlib.util.module_from_spec(spec)
        vars(package)["__version__"] = importlib.metadata.version("transformers")
        sys.modules["transformers"] = package
    try:
        return _import_whole()
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        return _import_whole()


def _import_whole() -> tuple[Any, ModuleType]:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    return PreTrainedTokenizerBase, chat_template_utils


with quick_imports():
    PreTrainedTokenizerBase, chat_template_utils = _import_tokenizers()
_OWN = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"tools", "documents"}


def main() -> None:
    """Answer each job with its chats, until one cannot be rendered; the kernel limits the time of each."""
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes to stderr
    setup = msgspec.json.decode(requests.readline(), type=ChatTemplate)
    tokenizer: Any = PreTrainedTokenizerBase(chat_template=setup.template, **setup.tokens)
    with open("/proc/self/statm") as file:  # its memory is limited to so much more than what is in use now
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + TEMPLATE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))
    for line in requests:
        job = msgspec.json.decode(line, type=Job)
        _set_clock(job.date)
        for chat, own in zip(job.chats, job.own, strict=True):
            signal.setitimer(signal.ITIMER_PROF, setup.seconds)
            rendered = _render_one(tokenizer, chat, job, {**job.settings, **own})
            signal.setitimer(signal.ITIMER_PROF, 0)
            replies.write(msgspec.json.encode(rendered) + b"\n")
            replies.flush()
            if rendered.error:
                break


def _render_one(tokenizer: Any, chat: list[dict[str, Any]], job: Job, settings: dict[str, Any]) -> Rendered:
    if taken := sorted(_OWN & settings.keys()):
        return Rendered(error=f"{taken[0]} is no variable of a template but a parameter of transformers' own")
    is_continued = job.continues and chat[-1]["role"] == "assistant"
    ending = {"continue_final_message" if is_continued else "add_generation_prompt": job.generate}
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, **ending, **settings))
        if len(text) > TEMPLATE_TEXT:
            raise OverflowError
    except MemoryError:
        return Rendered(error=f"it needs over {TEMPLATE_MEMORY // GIB} GiB of memory")
    except OverflowError:
        return Rendered(error=f"it writes over {TEMPLATE_TEXT // MIB} MiB")
    except Exception as error:
        if "Final message to continue:" in str(error):
            return Rendered(error="it drops or rewrites the last message, so that it cannot be continued")
        return Rendered(error=(str(error) or type(error).__name__)[:_ERROR_LIMIT])
    return Rendered(text)


def _set_clock(date: str | None) -> None:
    """Set the time that `strftime_now` returns: `date`, or the present for None."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Then":
            return cls.fromisoformat(str(date))

    vars(chat_template_utils)["datetime"] = datetime if date is None else Then


if __name__ == "__main__":
    main()
