"""Environments in processes that may be killed: one episode's fault costs that episode alone."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorad.envs.child import EpisodeAnswer
from lorad.envs.host import EnvironmentHost, HostedEpisode
from lorad.envs.protocol import Turn
from lorad.errors import SpecError
from lorad.records.episodes import Task
from lorad.spec.env import EnvSpec
from tests.kit.pool_kit import until

COUNTS = """
import os, re, subprocess, time
from lorad.envs.protocol import Observation

class Counts:
    '''Says how many turns it has heard; odd things when it is asked for.'''
    def __init__(self, start=0):
        self.heard = start

    def reset(self, row, seed):
        self.row, self.words = row, []
        return Observation(f"{row['name']} {self.heard}", metrics={"seed": float(seed)})

    def step(self, turn):
        self.words.append(turn.text)
        match turn.text:
            case "hang":
                re.match(r"(a+)+$", "a" * 64 + "b")
            case "die":
                os.kill(os.getpid(), 9)
            case "grow":
                self.memory = bytearray(1 << 30)
            case "fork":
                subprocess.Popen(["sleep", "600"], start_new_session=True)
            case "raise":
                raise KeyError("no such word")
            case "nonsense":
                return "words"
            case "nan":
                return Observation("more", float("nan"))
            case "secret":
                return Observation(os.environ.get("SECRET", "none") + os.environ.get("NAMED", "none"))
            case "once":
                path = self.row["name"]
                if not os.path.exists(path):
                    open(path, "w").close()
                    os.kill(os.getpid(), 9)
        self.heard += 1
        return Observation(f"{self.heard} " + " ".join(self.words), len(self.words))

    def close(self):
        pass
"""
Make = Callable[..., EnvironmentHost]


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """An EnvironmentHost of COUNTS; its processes must be gone when it is closed."""
    before, made = children(), list[EnvironmentHost]()

    def make(**settings: Any) -> EnvironmentHost:
        (tmp_path / "envs.py").write_text(COUNTS)
        spec: dict[str, Any] = {
            "name": "envs.py:Counts",
            "timeout": 2.0,
            "retry": 0,
            "memory": "512MiB",
        } | settings
        made.append(EnvironmentHost(EnvSpec(**spec), tmp_path))
        return made[-1]

    yield make
    for host in made:
        host.close()
    assert [process for process in children() if process not in before] == []


def begun(host: EnvironmentHost, count: int = 4) -> list[HostedEpisode]:
    pairs = host.begin([Task({"name": f"row{i}"}, i) for i in range(count)])
    assert [answer.messages for _, answer in pairs] == [f"row{i} 0" for i in range(count)]
    return [heard for heard, _ in pairs]


def said(host: EnvironmentHost, episodes: list[HostedEpisode], *words: str) -> list[EpisodeAnswer]:
    for heard, word in zip(episodes, words, strict=True):
        heard.turns.append(Turn(word, "stop"))
    return host.answers(episodes)


def test_each_episode_hears_its_own_turns(make: Make) -> None:
    host = make()
    episodes = begun(host, 5)
    said(host, episodes, *"abcde")
    found = said(host, episodes, *"fghij")
    assert [one.messages for one in found] == ["2 a f", "2 b g", "2 c h", "2 d i", "2 e j"]
    assert [one.reward for one in found] == [2.0] * 5


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("hang", "no result within 2 s"),
        ("die", "died of SIGKILL"),
        ("grow", "MemoryError: it needs more than its limit of 512 MiB (env.memory)"),
        ("raise", "envs.py:26: KeyError: 'no such word'"),
        ("nonsense", "returned str, not an Observation"),
        ("nan", "not a finite number"),
    ],
)
def test_a_fault_costs_its_own_episode(make: Make, word: str, says: str) -> None:
    host = make(workers=1)
    episodes = begun(host)
    said(host, episodes, *"abcd")
    found = said(host, episodes, "e", word, "g", "h")
    assert says in found[1].error
    assert [one.messages for one in found if not one.error] == ["2 a e", "2 c g", "2 d h"]
    others = [heard for place, heard in enumerate(episodes) if place != 1]
    assert [one.messages for one in said(host, others, *"ijk")] == ["3 a e i", "3 c g j", "3 d h k"]


def test_an_episode_without_an_answer_is_asked_again(make: Make, tmp_path: Path) -> None:
    host = make(workers=1, retry=1)
    (heard, _), *_ = host.begin([Task({"name": str(tmp_path / "was-here")}, 0)])
    said(host, [heard], "a")
    (found,) = said(host, [heard], "once")
    assert (found.messages, found.error) == ("2 a once", "")


def test_new_processes_bring_episodes_back(make: Make) -> None:
    host = make(workers=2)
    episodes = begun(host)
    said(host, episodes, *"abcd")
    for process in [p for p in children() if "lorad.envs.child" in " ".join(p.cmdline())]:
        with suppress(psutil.NoSuchProcess):  # of the guard and what it guards, each ends the other
            process.kill()
    found = said(host, episodes, *"efgh")
    found = [one for one in found if not one.error] or found
    assert {one.messages for one in found} <= {"2 a e", "2 b f", "2 c g", "2 d h"}


def test_no_child_of_an_environment_is_left(make: Make) -> None:
    host = make(workers=1)
    said(host, begun(host, 1), "fork")
    until(lambda: any(p.name() == "sleep" for p in children()))


def test_no_secret_reaches_an_environment(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SECRET", "secret")
    monkeypatch.setitem(os.environ, "NAMED", "given")
    host = make(workers=1, pass_env=["NAMED"])
    (found,) = said(host, begun(host, 1), "secret")
    assert found.messages == "nonegiven"


def test_arguments_reach_the_constructor(make: Make) -> None:
    host = make(args={"start": 7})
    ((_, answer),) = host.begin([Task({"name": "row"}, 0)])
    assert answer.messages == "row 7"


@pytest.mark.parametrize(
    ("name", "says"),
    [("looku", "no environment 'looku'"), ("none.py:Env", "no file"), ("envs.py:os", "no function os")],
)
def test_unknown_environments_are_refused(make: Make, name: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        make(name=name).start()
    assert caught.value.key == "env.name"


def test_incomplete_class_is_refused(make: Make, tmp_path: Path) -> None:
    host = make()
    (tmp_path / "half.py").write_text("class Half:\n    def reset(self, row, seed): ...\n")
    host = EnvironmentHost(EnvSpec(name="half.py:Half"), tmp_path)
    try:
        with pytest.raises(SpecError, match="Half has no step, close"):
            host.start()
    finally:
        host.close()
