"""A prompt for one version, or for two side by side, and what they say."""

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.suggester import SuggestFromList
from textual.timer import Timer
from textual.widgets import Input, Label

from lorad.client.client import Client
from lorad.errors import Conflict, LoradError, NotAllowed, SpecError
from lorad.records.requests import Sampling
from lorad.text import one_line, printable
from lorad.tui.actions.table import bindings
from lorad.tui.port import AppPort
from lorad.tui.screens.base import Base
from lorad.tui.widgets.line import Line

MOST = 8  # answers that are waited for, dropped ones among them
_SIDES = ("left", "right")
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_HISTORY = 100  # prompts
_SIGN = "✖"


@dataclass(frozen=True)
class Question:
    """A question to a target: an alias, run@12, or a run."""

    target: str
    prompt: str
    sampling: Sampling

    @property
    def command(self) -> str:
        how = self.sampling
        words = ["lorad", "generate", self.target, self.prompt]
        flags = ["--temperature", f"{how.temperature:g}"]
        flags += ["--max-new-tokens", str(how.max_new_tokens), "--seed", str(how.seed)]
        if self.target.startswith("-") or self.prompt.startswith("-"):
            return shlex.join([*words[:2], *flags, "--", *words[2:]])
        return shlex.join([*words, *flags])


@dataclass(frozen=True)
class _Answer:
    """An answer of a version. wrong: why there is none."""

    version: str = ""
    text: str = ""
    tokens: int = 0
    finish: str = ""
    seconds: float = 0.0
    wrong: str = ""


def sampling_of(temperature: str, most: str, seed: str) -> Sampling:
    """Read the sampling parameters that were typed. Raises SpecError."""
    return Sampling(
        temperature=_typed(float, temperature or "0", 0, "temperature", "a number from 0 on"),
        max_new_tokens=_typed(int, most or "64", 1, "max tokens", "a whole number from 1 on"),
        seed=_typed(int, seed or "0", 0, "seed", "a whole number from 0 on"),
    )


def _typed(kind: Callable[[str], Any], text: str, least: int, what: str, expected: str) -> Any:
    try:
        value = kind(text.strip())
    except ValueError:
        value = None
    if value is None or not least <= value < 2**63:  # nan is neither
        raise SpecError(f"{what}: {text!r} is not {expected}.")
    return value


def ask(client: Client, question: Question, report: Callable[[_Answer], object]) -> None:
    """Report the answer from a thread, which nobody waits for: leaving never waits for a pool."""

    def work() -> None:
        began = time.monotonic()
        try:
            answer = client.generate(question.target, question.prompt, question.sampling)
            (completion, *_) = answer.completions
            seconds = time.monotonic() - began
            figures = (len(completion.tokens), completion.finish or "", seconds)
            report(_Answer(str(answer.version), completion.text, *figures))
        except LoradError as error:
            report(_Answer(wrong=error.in_full, seconds=time.monotonic() - began))

    threading.Thread(target=work, name="chat", daemon=True).start()


@dataclass
class Answered(Message):
    """Carries an answer from a thread to the chat. number: the number of the question."""

    number: int
    side: str
    answer: _Answer


class Side(Vertical):
    """The answers of one version."""

    DEFAULT_CSS = """
    Side { width: 1fr; height: 100%; }
    Side .head { height: 1; width: 100%; padding: 0 1; background: $panel;
    text-wrap: nowrap; text-overflow: ellipsis; }
    Side VerticalScroll { height: 1fr; padding: 0 1; }
    Side VerticalScroll:focus { background: $boost; }
    Side .said { width: 100%; height: auto; }
    """

    def __init__(self, side: str) -> None:
        super().__init__(id=f"said-{side}")
        self.since: float | None = None  # by the monotonic clock: an answer is awaited
        self.target = ""
        self._head = Line(classes="head")
        self._text = Line(classes="said")

    def compose(self) -> ComposeResult:
        yield self._head
        with VerticalScroll():
            yield self._text

    def begin(self, target: str) -> None:
        self.target = target
        self.since = time.monotonic()
        self._text.say("")
        self.draw()

    def draw(self) -> None:
        """Show how long the answer has taken so far."""
        if self.since is not None:
            waited = time.monotonic() - self.since
            spinner = _SPINNER[int(waited * 4) % len(_SPINNER)]
            self._head.say(Text(f"{spinner} {one_line(self.target)}  {waited:.0f} s"))

    def end(self, answer: _Answer) -> None:
        self.since = None
        if answer.wrong:
            self._head.say(Text(f"{_SIGN} {one_line(self.target)}", style="bold red"))
            said = Text(printable(answer.wrong), style="red")
        else:
            who = self.target if self.target == answer.version else f"{self.target} → {answer.version}"
            pace = f" · {answer.tokens / answer.seconds:.0f} tok/s" if answer.seconds > 0 else ""
            figures = f"{answer.tokens} tok · {answer.seconds:.1f} s · {answer.finish}{pace}"
            self._head.say(Text.assemble((one_line(who), "bold"), "  ", one_line(figures)))
            said = Text(printable(answer.text)) if answer.text else Text("(no text)", style="dim")
        self._text.say(said)

    def drop(self) -> None:
        if self.since is not None:
            self.since = None
            self._head.say(Text(f"{one_line(self.target)}  dropped", style="dim"))


class ChatPanel(Vertical):
    """A chat that asks like `lorad generate`: prompts get the chat template if the run's own prompts do."""

    BINDINGS = bindings("chat")
    SCOPED_CSS = False  # it goes by the classes of its screen
    DEFAULT_CSS = """
    ChatPanel { border: round $primary; border-title-style: bold; height: 1fr; }
    ChatPanel:focus-within { border: round $accent; }
    ChatPanel .fields { height: 1; }
    ChatPanel .row { height: 1; width: auto; }
    ChatPanel Label { padding: 0 1; color: $text-muted; }
    ChatPanel Input { width: 16; }
    ChatPanel .small { width: 6; }
    ChatPanel #prompt { width: 100%; }
    ChatPanel .sides { height: 1fr; }
    ChatPanel #said-right { display: none; border-left: solid $primary; }
    ChatPanel.-two #said-right { display: block; }
    .-narrow ChatPanel .fields { layout: vertical; height: 2; }
    .-narrow ChatPanel Input { width: 10; }
    .-narrow ChatPanel .small { width: 6; }
    .-narrow ChatPanel #prompt { width: 100%; }
    .-wide ChatPanel Input { width: 26; }
    .-wide ChatPanel .small { width: 10; }
    .-wide ChatPanel #prompt { width: 100%; }
    .-short ChatPanel { border: none; }
    """

    @dataclass
    class Asked(Message):
        """Carries the command of a shell that asks the same."""

        line: str

    @dataclass
    class Refused(Message):
        """Says why what was typed cannot be asked."""

        error: LoradError

    class Left(Message):
        """The user is done here."""

    def __init__(self) -> None:
        super().__init__(id="chat")
        self._number = 0  # of the question that is asked
        self.under_way = 0  # answers, dropped ones among them
        self._history: list[str] = []
        self._place = 0  # in it
        self._timer: Timer | None = None
        self.sides = [Side(side) for side in _SIDES]

    def compose(self) -> ComposeResult:
        with Horizontal(classes="fields"):
            with Horizontal(classes="row"):
                yield Label("ask")
                yield Input(id="left", placeholder="alias, run@12", compact=True)
                yield Label("and")
                yield Input(id="right", placeholder="nobody else", compact=True)
            with Horizontal(classes="row"):
                yield Label("temp")
                yield Input("0", id="temperature", classes="small", compact=True)
                yield Label("max")
                yield Input("64", id="most", classes="small", compact=True)
                yield Label("seed")
                yield Input("0", id="seed", classes="small", compact=True)
        yield Input(
            id="prompt", placeholder="a prompt; enter asks, up and down find earlier ones", compact=True
        )
        with Horizontal(classes="sides"):
            yield from self.sides

    def on_mount(self) -> None:
        self.border_title = "Chat"
        self._timer = self.set_interval(0.25, self._draw, pause=True)

    # -- from the screen -------------------------------------------------------------------------------------
    def open(self, left: str, right: str) -> None:
        """Fill in two targets; what is typed already stays."""
        for side, target in zip(_SIDES, (left, right), strict=True):
            field = self.query_one(f"#{side}", Input)
            field.value = field.value or target
        self.query_one("#prompt", Input).focus()

    def suggest(self, names: Iterable[str]) -> None:
        """Set what targets are completed from."""
        suggester = SuggestFromList(names, case_sensitive=True)
        for side in _SIDES:
            self.query_one(f"#{side}", Input).suggester = suggester

    # -- asking ----------------------------------------------------------------------------------------------
    @property
    def is_waiting(self) -> bool:
        return any(side.since is not None for side in self.sides)

    def value(self, id: str) -> str:
        return self.query_one(f"#{id}", Input).value.strip()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        try:
            questions = self._questions()
        except LoradError as error:
            self.post_message(self.Refused(error))
            return
        prompt = questions[0].prompt
        if self._history[-1:] != [prompt]:
            self._history = [*self._history, prompt][-_HISTORY:]
        self._place = len(self._history)
        self._number += 1
        self.under_way += len(questions)
        self.set_class(len(questions) > 1, "-two")
        for name, side, question in zip(_SIDES, self.sides, questions, strict=False):
            side.begin(question.target)
            ask(cast(Base, self.screen).client, question, partial(self._report, self._number, name))
        if self._timer is not None:
            self._timer.resume()
        self.post_message(self.Asked("; ".join(question.command for question in questions)))

    def _questions(self) -> Sequence[Question]:
        """Return a question for each target.

        Raises SpecError where something is missing or wrong, NotAllowed or Conflict where it is not the time.
        """
        sampling = sampling_of(self.value("temperature"), self.value("most"), self.value("seed"))
        prompt = self.query_one("#prompt", Input).value
        targets = [target for target in (self.value("left"), self.value("right")) if target]
        if not targets or not prompt:
            missing = "a prompt" if targets else "a version"
            raise SpecError(
                f"{missing} is missing.", hint="An alias, run@12, or a run for its current version."
            )
        if cast(AppPort, self.app).readonly:
            raise NotAllowed("Read-only: nothing is asked.", hint="It might start a pool.")
        if self.is_waiting:
            raise Conflict("The answer to the last prompt is still coming.", hint="esc drops it.")
        if self.under_way + len(targets) > MOST:
            raise Conflict(
                f"{self.under_way} answers that were dropped are under way.", hint="Wait for some."
            )
        return [Question(target, prompt, sampling) for target in targets]

    def _report(self, number: int, side: str, answer: _Answer) -> None:
        with contextlib.suppress(RuntimeError):  # the interface has ended
            self.post_message(Answered(number, side, answer))

    def on_answered(self, message: Answered) -> None:
        """Show an answer, unless nobody waits for it any more."""
        message.stop()
        self.under_way -= 1
        side = self.query_one(f"#said-{message.side}", Side)
        if message.number == self._number and side.since is not None:
            side.end(message.answer)
        self._rest()

    def _draw(self) -> None:
        for side in self.sides:
            side.draw()

    def _rest(self) -> None:
        if self._timer is not None and not self.is_waiting:
            self._timer.pause()

    # -- keys ------------------------------------------------------------------------------------------------
    def action_leave(self) -> None:
        """Drop the answers that are awaited; leave where there are none."""
        if not self.is_waiting:
            self.post_message(self.Left())
            return
        for side in self.sides:
            side.drop()
        self._rest()

    def action_recall(self, by: int) -> None:
        """Recall an earlier prompt; past the newest one, the field is empty."""
        self._place = min(max(self._place + by, 0), len(self._history))
        field = self.query_one("#prompt", Input)
        field.value = self._history[self._place] if self._place < len(self._history) else ""
        field.cursor_position = len(field.value)

    def action_page(self, by: int) -> None:
        for side in self.sides:
            said = side.query_one(VerticalScroll)
            said.scroll_relative(y=by * max(said.size.height - 1, 1), animate=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        focused = self.screen.focused
        return action != "recall" or (focused is not None and focused.id == "prompt")
