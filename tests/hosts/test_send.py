"""`--send`: the files that a spec names go along to the box, and runs begin among them.

The cases with a real sshd have mark.system.
"""

import json
import os
from pathlib import Path

import pytest

from lorad.bounds import BUNDLE_BYTES, BUNDLE_FILES, BUNDLE_PART
from lorad.client.boxes.bundle import files_here, send
from lorad.errors import IntegrityError, SpecError
from lorad.records.requests import RunRequest
from tests.hosts.conftest import REAL, Box

REWARD = "def score(completion, answer):\n    return float(answer in completion)\n"
SPEC = """
algorithm: {group_size: 2}
data: {train: rows/train.jsonl, prompts_per_step: 2}
reward: ./reward.py:score
trainer: {steps: 1}
rollout: {max_new_tokens: 4}
eval: {every: 0}
"""


def _write(work: Path, rows: int = 4, note: str = "") -> None:
    row = {"prompt": "S:21=", "answer": "12"} | ({"note": note} if note else {})
    (work / "rows").mkdir(exist_ok=True)
    (work / "rows/train.jsonl").write_text((json.dumps(row) + "\n") * rows)
    (work / "reward.py").write_text(REWARD)
    (work / "sent.yaml").write_text(SPEC)


@pytest.mark.system
@REAL
def test_a_run_begins_among_its_files(box: Box) -> None:
    work = box.here / "work"
    _write(work)
    assert "`lorad --host h2 --send …`" in box.there("check", "sent.yaml", expect=2).stderr
    box.lorad("--host", "h2", "--send", "run", "sent.yaml", "--name", "sent", "--wait")
    (place,) = (box.far.home.root / "bundles").glob("*/*")
    assert place.parent.name == str(os.getuid()) and place.stat().st_mode & 0o777 == 0o700
    files = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert files == {"rows/train.jsonl", "reward.py"}
    before = place.stat().st_ino
    box.lorad("--host", "h2", "--send", "check", "sent.yaml")  # nothing is sent twice
    assert [path.stat().st_ino for path in (box.far.home.root / "bundles").glob("*/*")] == [before]
    os.utime(place, (0, 0))
    assert json.loads(box.there("gc", "--json").stdout)["deleted"] == []
    box.there("rm", "sent", "--yes")
    os.utime(place, (0, 0))
    deleted = json.loads(box.there("gc", "--json").stdout)["deleted"]
    assert str(place) in [item["path"] for item in deleted] and not place.exists()
    assert box.stopped_daemons()


def test_large_files_come_in_parts(box: Box) -> None:
    work = box.here / "work"
    _write(work, rows=40, note="x" * (BUNDLE_PART // 16))
    box.lorad("--host", "h2", "--send", "check", "sent.yaml", "data.train=rows/train.jsonl")
    (place,) = (box.far.home.root / "bundles").glob("*/*")
    sent = place / "rows/train.jsonl"
    assert sent.read_bytes() == (work / "rows/train.jsonl").read_bytes()


def test_what_cannot_be_sent_is_told(box: Box) -> None:
    work = box.here / "work"
    _write(work)
    (work.parent / "above.jsonl").write_text("{}\n")
    above = box.lorad("--host", "h2", "--send", "check", "sent.yaml", "data.train=../above.jsonl", expect=2)
    assert "../above.jsonl is not below the directory of the spec" in above.stderr and "--cwd" in above.stderr
    with (work / "large.jsonl").open("wb") as file:
        file.truncate(BUNDLE_BYTES)
    large = box.lorad("--host", "h2", "--send", "check", "sent.yaml", "data.train=large.jsonl", expect=2)
    assert "more than 64 MiB" in large.stderr and "--cwd" in large.stderr
    for words in (("--host", "h2", "--send", "list"), ("--host", "h2", "--send", "--cwd", "/", "check", "a")):
        assert "--send is for run, check, try, sweep" in box.lorad(*words, expect=2).stderr
    assert "--send sends to another box" in box.lorad("--send", "check", "sent.yaml", expect=2).stderr
    assert box.stopped_daemons()


def _request(work: Path, train: str) -> RunRequest:
    return RunRequest(f"data: {{train: {train}}}", "a.yaml", str(work), [])


def test_directories_are_sent_whole(tmp_path: Path) -> None:
    (tmp_path / "rows/inner/__pycache__").mkdir(parents=True)
    for name in ("a.jsonl", "inner/b.jsonl", "inner/__pycache__/c.pyc"):
        (tmp_path / "rows" / name).write_text(name)
    box = _Taking()
    assert send(box, _request(tmp_path, "./rows")) == "/there"  # type: ignore[arg-type]
    assert box.data.splitlines()[0] == b'[["rows/a.jsonl",7],["rows/inner/b.jsonl",13]]'
    for number in range(BUNDLE_FILES):
        (tmp_path / f"rows/{number}").touch()
    with pytest.raises(SpecError, match="are more than 1000 files"):
        send(box, _request(tmp_path, "./rows"))  # type: ignore[arg-type]


def test_paths_of_the_box_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    for train in (str(tmp_path / "rows.jsonl"), "~/rows.jsonl", "sort", "owner/rows"):
        assert files_here(_request(tmp_path, train)) == {}
    assert list(files_here(_request(tmp_path, "rows.jsonl"))) == ["rows.jsonl"]


def test_a_box_that_takes_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(IntegrityError, match="takes no more"):
        send(_Taking(most=0), _request(tmp_path, "rows.jsonl"))  # type: ignore[arg-type]


class _Taking:
    """A daemon that takes at most so many bytes."""

    def __init__(self, most: int = BUNDLE_BYTES) -> None:
        self.data = b""
        self._most = most

    def ask(self, method: str, path: str, part: object) -> dict[str, object]:
        self.data = (self.data[: part.offset] + part.data)[: self._most]  # type: ignore[attr-defined]
        is_whole = len(self.data) == part.size  # type: ignore[attr-defined]
        return {"sha256": path[-64:], "received": len(self.data), "directory": "/there" * is_whole}
