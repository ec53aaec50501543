"""What the daemon asks the process that completes prompts (`completer.py`), and the lines of its answer."""

import msgspec
from msgspec import Struct

from lorad.protocol.calls import LoadVersion
from lorad.protocol.preflight import ErrorFacts
from lorad.records.requests import GenerateRequest
from lorad.spec.data import Data


class PoolQuestion(Struct, frozen=True):
    """What to complete, with which version of which pool.

    socket: where the pool answers.
    model_path: the directory of its base.
    load: the version.
    chat: how the version's run makes chats of its prompts; None where it makes none.
    body: the prompts.
    """

    socket: str
    model_path: str
    load: LoadVersion
    chat: Data | None
    body: GenerateRequest


class AnswerLine(Struct, frozen=True, omit_defaults=True):
    """A line of the answer: what is being done, or at the end the answer itself (a Generated) or an error."""

    doing: str = ""
    answer: msgspec.Raw = msgspec.Raw()
    error: ErrorFacts | None = None
