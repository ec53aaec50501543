"""What the door notes, and that its log does not grow with what later notes have replaced."""

import os
from pathlib import Path
from typing import Any

import pytest

from lorad.tinker.door import state
from lorad.tinker.door.state import Model, RequestedLora, Sampler, Session, State

SESSION = Session("s", "alice", 1.0)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have notes dropped after a few, in small segments."""
    monkeypatch.setattr(state, "_SPARE", 4)
    monkeypatch.setattr(state, "_SEGMENT", 400)


def filled(root: Path) -> State:
    """A model that was parked often, a checkpoint that was marked often, and samplers."""
    noted = State.open(root / "notes")
    noted.note(SESSION)
    noted.mark("tinker://s/weights/a", gone=True)
    noted.note(Sampler("s:sample:0", "s", "alice", "base", "run@1"))
    noted.note(Sampler("s:sample:1", "s", "alice", "base", "run@1", "tinker://s/sampler_weights/c"))
    for number in range(20):
        noted.note(
            Model("s:train:0", "s", "alice", "run", "base", RequestedLora(), 1.0, parked=bool(number % 2))
        )
        noted.mark("tinker://s/weights/b", public=bool(number % 2))
    return noted


def known(noted: State) -> dict[str, Any]:
    return {key: getattr(noted, key) for key in ("sessions", "models", "samplers", "marks")}


def reopened(root: Path) -> dict[str, Any]:
    again = State.open(root / "notes")
    again.log.close()
    return known(again)


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "notes").iterdir())


def test_notes_that_were_replaced_are_dropped(tmp_path: Path) -> None:
    noted = filled(tmp_path)
    before = size(tmp_path)
    noted.shorten()
    after = size(tmp_path)
    noted.shorten()  # there is nothing more
    noted.log.close()
    assert after < before / 2 and size(tmp_path) == after
    assert reopened(tmp_path) == known(noted)


def test_samplers_of_a_session_without_files_go(tmp_path: Path) -> None:
    noted = filled(tmp_path)
    noted.note(Session("s", "alice", 1.0, cleaned=True))
    noted.shorten()
    noted.log.close()
    assert list(noted.samplers) == ["s:sample:1"]
    assert reopened(tmp_path) == known(noted)


def test_a_death_while_notes_are_dropped_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = filled(tmp_path)

    def dies(path: Path) -> None:
        os.unlink(path)
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dies)
        with pytest.raises(OSError, match="power cut"):
            noted.shorten()
    noted.log.close()
    assert reopened(tmp_path) == known(noted)
