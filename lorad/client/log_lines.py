"""Read lines of logs, whoever wrote them: how bad a line is, when it was written, which words it has."""

import re
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lorad.errors import SpecError

LEVELS = ("debug", "info", "warning", "error")
_WORD = re.compile(r'(!?)(?:"([^"]*)"?|(\S+))')
_BAD = re.compile(
    r"\b(?:CRITICAL|FATAL|ERROR)\b|\[?\b[EF]\d{4} \d\d:"
    r"|^\s*(?:Traceback \(|error:|fatal:|[\w.]*(?:Error|Exception)(?::|$))"
)
_ODD = re.compile(r"\bWARN(?:ING)?\b|\[?\bW\d{4} \d\d:|^\s*warning:|\b\w*Warning:")
_QUIET = re.compile(r"\b(?:DEBUG|TRACE)\b")
# lorad's and SGLang's with a year, vLLM's and torch's without one
_TIME = re.compile(r"(?:\b(\d{4})-)?\b[IWEF]?(\d\d)-?(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_HEAD = 160  # characters in which level and time stand

Words = list[tuple[bool, str]]  # whether it must not be there, and the word in lower case


def level(line: str) -> str:
    """Name the level of a line: error, warning, debug, or an empty text."""
    head = line[:_HEAD]
    if _BAD.search(head):
        return "error"
    if _ODD.search(head):
        return "warning"
    return "debug" if _QUIET.search(head) else ""


def written_at(line: str, now: float) -> float | None:
    """Read when a line was written, in Unix seconds by this machine's clock; None where it does not say.

    now: the newest that it can be, which decides the year where the line has none.
    """
    stamp = _TIME.search(line[:_HEAD])
    if stamp is None:
        return None
    year, *rest = stamp.groups()
    month, day, hour, minute, second = map(int, rest)
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second <= 60):
        return None
    this_year = time.localtime(now).tm_year
    parts = (month, day, hour, minute, second, 0, 0, -1)
    if year and not 1970 <= int(year) <= this_year + 1:
        return None
    at = time.mktime((int(year or this_year), *parts))
    return time.mktime((this_year - 1, *parts)) if not year and at > now + 86400 else at


def words(text: str) -> Words:
    """Split a filter into words: `!word` must not be there, quotes hold blanks together."""
    typed = ((bool(no), (quoted or plain).casefold()) for no, quoted, plain in _WORD.findall(text))
    return [word for word in typed if word[1]]


def has_words(line: str, words: Iterable[tuple[bool, str]]) -> bool:
    folded = line.casefold()
    return all((word in folded) is not is_not for is_not, word in words)


class Wish(NamedTuple):
    """Which lines of a log are asked for; without anything, all of them.

    words: the words that a line has to have, or must not have.
    least: its least level; "" for any.
    since: the Unix time after which it was written; 0 for any.
    node: the node of a cluster that it came from: a line begins with its name, which is left out.
    """

    words: tuple[tuple[bool, str], ...] = ()
    least: str = ""
    since: float = 0.0
    node: str = ""

    def __bool__(self) -> bool:
        return bool(self.words or self.least or self.since or self.node)


def wish(grep: str | None, least: str | None, age: float | None, node: str | None, now: float) -> Wish:
    """Read what is asked for. age: seconds. Raises SpecError, which says what is wrong."""
    sought = words(grep or "")
    if grep is not None and not sought:
        hint = "Write words that a line has to have: 'nan loss', '\"out of memory\"', 'warning !resource'."
        raise SpecError(f"--grep {grep!r} has no word to look for", hint=hint)
    if least is not None and least not in LEVELS:
        hint = f"Choose one of {', '.join(LEVELS)}."
        raise SpecError(f"--level {least}: there is no such level", hint=hint)
    return Wish(tuple(sought), least or "", 0.0 if age is None else now - age, node or "")


class Sieve:
    """Chooses the lines of one log, in their order.

    A line that does not say when it was written has the time of the line before. An indented one has the
    level of the line before too, so that a traceback stays whole.

    has_times: whether a line said when it was written.
    """

    def __init__(self, wish: Wish) -> None:
        self.has_times = False
        self._wish = wish
        self._at = 0.0
        self._level = "info"

    def choose(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines that are asked for."""
        wish = self._wish
        begins = f"{wish.node}: " if wish.node else ""
        for whole in lines:
            if not whole.startswith(begins):
                continue
            line = whole.removeprefix(begins)
            if wish.since:
                at = written_at(line, time.time())
                self.has_times |= at is not None
                self._at = self._at if at is None else at
            if wish.least and not line[:1].isspace():
                self._level = level(line) or "info"
            is_new = self._at >= wish.since
            is_bad = not wish.least or LEVELS.index(self._level) >= LEVELS.index(wish.least)
            if is_new and is_bad and has_words(line, wish.words):
                yield line
