"""Runs environments in a process of their own: `python -m lorad.envs.child LIFELINE`.

JSON lines: an EnvClass, answered by Ready; then one Ask at a time, answered by EpisodeAnswer. See
`lorad/children/user_code.py`.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lorad.startup import quick_imports

with quick_imports():
    import msgspec
    from msgspec import Struct

    from lorad.children.user_code import describe, import_function
    from lorad.children.user_serve import Code, serve
    from lorad.envs.builtin import BUILTIN
    from lorad.envs.factory import Factory, is_factory
    from lorad.envs.protocol import Env, Message, Observation, Turn
    from lorad.envs.tools import stepped
    from lorad.errors import LoradError
    from lorad.records.episodes import Task
    from lorad.rl.tools.specs import wrapped_all


class EnvClass(Code):
    """A class in a file, or a builtin environment without a file. Its constructor takes `args`."""

    args: dict[str, Any] = msgspec.field(default_factory=dict)


class Ask(Struct, frozen=True):
    """Asks for the last observation of an episode after these turns.

    over: Episodes that are over, and can be closed.
    at_limit: Whether all turns are answered, and it asks what an episode earns that a limit has ended.
    """

    episode: int
    task: Task
    turns: list[Turn]
    over: list[int] = []
    at_limit: bool = False


class EpisodeAnswer(Struct, frozen=True):
    """The last observation, or an error.

    seconds: The time of all turns that were made for it.
    tools: The tools of an episode that begins, in OpenAI's form.
    scores_at_limit: Whether the environment tells what an episode earns that a limit ends.
    """

    messages: str | list[Message] | None = None
    reward: float = 0.0
    metrics: dict[str, float] = {}
    error: str = ""
    seconds: float = 0.0
    is_last: bool = False
    replaces: bool = False
    tools: list[dict[str, Any]] = []
    tool_errors: int = 0
    scores_at_limit: bool = False


def main(lifeline: int) -> None:
    serve(lifeline, EnvClass, _load)


def _load(setup: EnvClass) -> tuple[Callable[[bytes], EpisodeAnswer], list[str]]:
    kind: Callable[..., Env] = import_function(setup) if setup.file else BUILTIN[setup.function]
    if is_factory(kind):
        kind = partial(Factory, kind)
    elif missing := [name for name in ("reset", "step", "close") if not hasattr(kind, name)]:
        raise LoradError(
            f"{setup.function} has no {', '.join(missing)}",
            hint="An environment has reset(row, seed), step(turn) and close(); see docs/environments.md.",
        )
    episodes = _Episodes(setup, kind)
    return lambda line: episodes.answer(msgspec.json.decode(line, type=Ask)), []


class _Episodes:
    """The episodes of this process."""

    def __init__(self, setup: EnvClass, kind: Callable[..., Env]) -> None:
        self._setup = setup
        self._kind = kind
        self._episodes: dict[int, tuple[Env, int]] = {}  # with the number of turns so far

    def answer(self, ask: Ask) -> EpisodeAnswer:
        started = time.monotonic()
        try:
            for episode in ask.over:
                self._close(episode)
            env, count = self._episodes.get(ask.episode, (None, 0))
            observed: Any = None
            if env is None or count != len(ask.turns) - (not ask.at_limit):
                self._close(ask.episode)
                env = self._kind(**self._setup.args)
                count = 0
                observed = env.reset(ask.task.row, ask.task.seed)
            for turn in ask.turns[count:]:
                observed = stepped(env, turn)
            self._episodes[ask.episode] = (env, len(ask.turns))
            if ask.at_limit:
                scored: Any = env
                observed = Observation(None, float(scored.at_limit()))
            if not isinstance(observed, Observation):
                raise ValueError(f"returned {type(observed).__name__}, not an Observation")
            if not abs(float(observed.reward)) < 1e30:  # NaN too
                raise ValueError(f"returned the reward {observed.reward}, not a finite number")
            tools = [] if ask.turns else wrapped_all(getattr(env, "tools", ()))
        except BaseException as error:
            self._episodes.pop(ask.episode, None)
            failure = describe(error, self._setup)
            return EpisodeAnswer(error=failure, is_last=isinstance(error, MemoryError))
        messages = observed.messages if isinstance(observed.messages, str | None) else [*observed.messages]
        seconds = time.monotonic() - started
        return EpisodeAnswer(
            messages,
            float(observed.reward),
            dict(observed.metrics),
            seconds=seconds,
            replaces=observed.replaces,
            tools=tools,
            tool_errors=observed.tool_errors,
            scores_at_limit=hasattr(env, "at_limit"),
        )

    def _close(self, episode: int) -> None:
        if episode in self._episodes:
            self._episodes.pop(episode)[0].close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
