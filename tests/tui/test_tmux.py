"""A session over SSH, as it were: the real program in tmux, a real daemon and real runs, by keys alone."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest

from lorad.records.runs import RunDetails
from tests.kit.tmux import Terminal
from tests.kit.world import REPOSITORY, World, world

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux: apt install tmux"),
]

SMALL = (
    "trainer.steps=400 data.prompts_per_step=2 algorithm.group_size=4 eval.every=0 checkpoint.every=2 "
    "reward={}/slow.py:score"
)
# Whoever types needs seconds, in which nothing has to be computed. Rewards differ: steps make versions.
SLOW = """
import time
def score(completion):
    time.sleep(0.05)
    return float(len(set(completion)))
"""


class User:
    """What somebody does in front of the terminal, and how they look whether it is so."""

    def __init__(self, terminal: Terminal, made: World) -> None:
        self.terminal, self.made = terminal, made

    def run(self, name: str) -> RunDetails:
        return self.made.client.show(name)

    def step(self) -> int:
        """Return the step of the run on the screen."""
        found = re.search(r"step (\d+)/", self.terminal.text)
        return int(found[1]) if found else -1

    def newest(self) -> str:
        """The version under the cursor of the table of versions."""
        found = re.search(r"(first@\d+) step", self.terminal.text)
        return found[1] if found else ""

    def starts_a_run(self) -> None:
        self.terminal.until("lorad init")
        self.terminal.press("n")
        self.terminal.until("from what?", "small")
        self.terminal.press("Enter")
        self.terminal.until("from template small")
        self.terminal.type("first")
        self.terminal.press("BTab", "BTab")  # the last field
        self.terminal.until("Any other key=value")
        self.terminal.type(SMALL.format(self.made.root))
        self.terminal.until("slow.py:score")
        self.terminal.press("C-s")
        self.terminal.until("1 curves", "first")
        assert self.run("first").spec["trainer"]["steps"] == 400

    def watches_it_learn(self) -> None:
        self.terminal.wait(lambda: self.step() > 1, "a second step")
        before = self.step()
        self.terminal.wait(lambda: self.step() > before, "another step")
        self.terminal.wait(lambda: bool(re.search(r"reward\s+\d\.\d", self.terminal.text)), "its reward")
        assert self.run("first").step >= before

    def looks_at_samples(self) -> None:
        self.terminal.press("2")
        text = self.terminal.until("advantage", "answer: ")
        shown = re.search(r"S:\d+=", text)
        assert shown and self.made.client.samples("first")

    def pins_and_swaps(self) -> None:
        self.terminal.press("3")
        name = self.terminal.wait(self.newest, "a version under the cursor")
        self.terminal.press("i")
        self.terminal.until(f"{name} is pinned")
        self.terminal.press("w")
        self.terminal.until(f"Swap {name}")
        self.terminal.type("bot")
        self.terminal.until(f"lorad swap bot {name}")
        self.terminal.press("Enter")
        self.terminal.until(f"bot serves {name}")
        run, _, number = name.partition("@")
        assert any(row.pinned for row in self.made.client.adapters(run) if row.version == int(number))
        assert [(row.alias, row.version) for row in self.made.client.aliases()] == [("bot", int(number))]

    def loses_its_daemon(self) -> None:
        os.kill(self.made.client.status().pid, signal.SIGKILL)
        self.terminal.until("No daemon since")
        self.made.lorad("daemon", "start")
        self.terminal.wait(lambda: "No daemon" not in self.terminal.text, "the daemon is back")

    def pauses_and_resumes(self) -> None:
        self.terminal.press("P")
        self.terminal.until("paused")
        assert self.run("first").state == "paused"
        checkpoints = self.made.client.checkpoints("first")
        steps = [row.step for row in checkpoints]
        self.terminal.press("4")
        # fewer than steps: some make no update
        self.terminal.until("newest, whole", f"@{checkpoints[-2].version}")
        self.terminal.press("j", "r")
        self.terminal.until("Resume first", f"lorad resume first --detach --from {steps[-2]}")
        self.terminal.press("C-s")
        self.terminal.until("Resume first?", "done again")
        self.terminal.press("y")
        self.terminal.until("attempt 2")
        assert self.run("first").attempts[-1].resumed_from == steps[-2]

    def forks_and_deletes_the_fork(self) -> None:
        self.terminal.press("P")
        self.terminal.until("paused")
        self.terminal.press("g", "f")
        self.terminal.until("Fork first@")
        self.terminal.type("branch")
        self.terminal.press("Down")
        self.terminal.type("2")
        self.terminal.until("--name branch --steps 2")
        self.terminal.press("C-s")
        self.terminal.until("branch is queued")
        self.terminal.press("Escape")
        self.terminal.wait(lambda: "completed" in self.terminal.line(" branch "), "the fork is over")
        assert str(self.run("branch").origin).startswith("first@")
        self.terminal.press("G", "C-d")  # what ended comes last
        self.terminal.until("branch?", "deleted for good")
        self.terminal.press("y")
        self.terminal.until("branch is deleted")
        assert [run.name for run in self.made.client.list(all=True)] == ["first"]


@pytest.fixture
def user() -> Iterator[User]:
    with world() as made:
        made.lorad("daemon", "start")
        (made.root / "slow.py").write_text(SLOW)
        env = {"LORAD_HOME": str(made.home.root), "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"}
        with Terminal(sys.executable, "-m", "lorad", "tui", env=env) as terminal:
            yield User(terminal, made)


def test_whole_life_of_a_run_by_keys(user: User) -> None:
    user.starts_a_run()
    user.watches_it_learn()
    user.looks_at_samples()
    user.pins_and_swaps()
    user.loses_its_daemon()
    user.pauses_and_resumes()
    user.forks_and_deletes_the_fork()
