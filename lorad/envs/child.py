"""The process in which environments run: `python -m lorad.envs.child LIFELINE`.

JSON lines: an EnvClass, answered by Ready; then one Ask at a time, answered by EpisodeAnswer. See
`lorad/children/user_code.py`.
"""

import sys
import time
from collections.abc import Callable
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
    """A class in a file, or without a file the builtin one of that name. args: for its constructor."""

    args: dict[str, Any] = msgspec.field(default_factory=dict)


class Ask(Struct, frozen=True):
    """Bring an episode to where it has heard these turns; the last observation is the answer.

    over: episodes that are not asked for again.
    at_limit: the turns are answered, and a limit has ended the episode: what does it earn?
    """

    episode: int
    task: Task
    turns: list[Turn]
    over: list[int] = []
    at_limit: bool = False


class EpisodeAnswer(Struct, frozen=True):
    """What the environment said last, or what went wrong.

    seconds: how long all turns took that were made for it.
    tools: the tools of an episode that begins, in OpenAI's form.
    scores_at_limit: whether it is to be asked what an episode earns that a limit ends.
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
    kind = import_function(setup) if setup.file else BUILTIN[setup.function]
    if is_factory(kind):
        episodes = _Episodes(setup, lambda **args: Factory(kind, args))
        return lambda line: episodes.answer(msgspec.json.decode(line, type=Ask)), []
    if missing := [name for name in ("reset", "step", "close") if not hasattr(kind, name)]:
        raise LoradError(
            f"{setup.function} has no {', '.join(missing)}",
            hint="An environment has reset(row, seed), step(turn) and close(); see docs/environments.md.",
        )
    episodes = _Episodes(setup, kind)
    return lambda line: episodes.answer(msgspec.json.decode(line, type=Ask)), []


class _Episodes:
    """The episodes of this process, each with how many turns it has heard."""

    def __init__(self, setup: EnvClass, kind: Callable[..., Env]) -> None:
        self._setup = setup
        self._kind = kind
        self._there: dict[int, tuple[Env, int]] = {}

    def answer(self, ask: Ask) -> EpisodeAnswer:
        started = time.monotonic()
        try:
            for episode in ask.over:
                self._close(episode)
            env, heard = self._there.get(ask.episode, (None, 0))
            observed: Any = None
            if env is None or heard != len(ask.turns) - (not ask.at_limit):
                self._close(ask.episode)
                env = self._kind(**self._setup.args)
                heard = 0
                observed = env.reset(ask.task.row, ask.task.seed)
            for turn in ask.turns[heard:]:
                observed = stepped(env, turn)
            self._there[ask.episode] = (env, len(ask.turns))
            if ask.at_limit:
                scored: Any = env
                observed = Observation(None, float(scored.at_limit()))
            if not isinstance(observed, Observation):
                raise ValueError(f"returned {type(observed).__name__}, not an Observation")
            if not abs(float(observed.reward)) < 1e30:  # NaN too
                raise ValueError(f"returned the reward {observed.reward}, not a finite number")
            tools = [] if ask.turns else wrapped_all(getattr(env, "tools", ()))
        except BaseException as error:
            self._there.pop(ask.episode, None)
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
        if episode in self._there:
            self._there.pop(episode)[0].close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
