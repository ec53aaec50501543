"""Recorded episodes played again to fresh environments."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from lorad.envs.episode import EpisodeEnd, EpisodeTurn, Task
from lorad.envs.host import Host
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
    number = 0
    while live:
        for episode, heard in live:
            heard.turns.append(Turn(episode.turns[number].text, episode.turns[number].finish))
        answers = host.answers([heard for _, heard in live])
        left = []
        for (episode, heard), answer in zip(live, answers, strict=True):
            turn, last = episode.turns[number], number == len(episode.turns) - 1
            now = "" if answer.messages is None else shown(answer.messages)
            why = answer.error if episode.end != "failed" or not last else ""
            if not why and not answer.error and answer.reward != turn.reward:
                why = f"reward {answer.reward:g}, recorded {turn.reward:g}"
            elif not why and not last and now != turn.observation:
                why = f"{now!r}, recorded {turn.observation!r}"
            if why:
                yield Difference(episode.prompt_id, episode.index, number + 1, why)
            elif not last:
                left.append((episode, heard))
        live, number = left, number + 1
