"""Recorded episodes played again to fresh environments."""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace as changed

from lorad.envs.child import Answer
from lorad.envs.episode import LIMITS, EpisodeEnd, EpisodeTurn, Task
from lorad.envs.host import Heard, Host
from lorad.envs.protocol import Turn, shown


class _Recorded(Protocol):
    """An episode as it was kept."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def task(self) -> Task | None: ...
    @property
    def turns(self) -> list[EpisodeTurn]: ...
    @property
    def end(self) -> EpisodeEnd | None: ...


class Difference(Struct, frozen=True):
    """The first turn of an episode, from 1, that is answered otherwise than it was."""

    prompt_id: str
    index: int
    turn: int
    differs: str


def differences(host: Host, episodes: Sequence[_Recorded]) -> Iterator[Difference]:
    """Yield the first difference of each episode that has one. Episodes without a turn are left out."""
    known = [(episode, episode.task) for episode in episodes if episode.turns and episode.task]
    begun = host.begin([task for _, task in known])
    live = [(episode, heard) for (episode, _), (heard, _) in zip(known, begun, strict=True)]
    scored = {heard.number for heard, answer in begun if answer.scores_at_limit}
    number = 0
    while live:
        answers = _again(host, live, number, scored)
        left = []
        for (episode, heard), answer in zip(live, answers, strict=True):
            if why := _difference(episode, number, answer):
                yield Difference(episode.prompt_id, episode.index, number + 1, why)
            elif number < len(episode.turns) - 1:
                left.append((episode, heard))
        live, number = left, number + 1


def _again(
    host: Host, live: Sequence[tuple[_Recorded, Heard]], number: int, scored: Collection[int]
) -> list[Answer]:
    """Play a turn of each again. scored: episodes that are asked what they earn where a limit ends them."""
    for episode, heard in live:
        said = episode.turns[number]
        heard.turns.append(Turn(said.text, said.finish, said.calls))
    answers = host.answers([heard for _, heard in live])
    limited = [
        place
        for place, (episode, heard) in enumerate(live)
        if heard.number in scored and episode.end in LIMITS and number == len(episode.turns) - 1
    ]
    for place in limited:
        live[place][1].at_limit = True
    for place, earned in zip(limited, host.answers([live[place][1] for place in limited]), strict=True):
        answer = answers[place]
        reward, error = answer.reward + earned.reward, answer.error or earned.error
        answers[place] = changed(answer, reward=reward, error=error)
    return answers


def _difference(episode: _Recorded, number: int, answer: Answer) -> str:
    """Return in what a turn was answered otherwise; "" where it was not."""
    turn, last = episode.turns[number], number == len(episode.turns) - 1
    now = "" if answer.messages is None else shown(answer.messages)
    why = answer.error if episode.end != "failed" or not last else ""
    if not why and not answer.error and answer.reward != turn.reward:
        return f"reward {answer.reward:g}, recorded {turn.reward:g}"
    if not why and not last and now != turn.observation:
        return f"{now!r}, recorded {turn.observation!r}"
    if not why and not last and episode.turns[number + 1].row > turn.row and not answer.replaces:
        return "it adds to the history, recorded: it replaces it"
    return why
