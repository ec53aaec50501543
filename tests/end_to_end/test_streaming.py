"""A run whose rows a hub streams: N steps, a kill, a resume and M steps are N + M steps."""

import json
import os
import signal
from pathlib import Path

import pytest

from lorad.rl.streaming import reader
from lorad.rl.tasks import problem
from tests.kit.fakes.hub import NAME, hub
from tests.kit.world import SMALL, world

pytestmark = pytest.mark.system

SPEC = f"""
algorithm: {{group_size: 4}}
data: {{train: {NAME}, streaming: true, buffer: 20, prompts_per_step: 8}}
trainer: {{lr: 2.0e-3, steps: 16}}
rollout: {{max_new_tokens: 12, max_staleness: 1}}
eval: {{every: 8, problems: 8}}
checkpoint: {{every: 3, keep: 2}}
"""


def files(letter: str) -> dict[str, bytes]:
    """Two shards of 50 rows: an epoch is over after 11 steps."""
    found = [problem("sort", "train", 0, number) for number in range(100)]
    rows = [{"prompt": f"{letter}{one.prompt[1:]}", "answer": one.answer} for one in found]
    shards = (b"".join(json.dumps(row).encode() + b"\n" for row in rows[n : n + 50]) for n in (0, 50))
    return {f"data/train-{n:05d}-of-00002.jsonl": shard for n, shard in enumerate(shards)}


@pytest.mark.long
def test_killed_stream_continues_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the dataset has a newer commit meanwhile."""
    pytest.importorskip("datasets")
    with hub(files("S")) as there:
        monkeypatch.setenv("HF_ENDPOINT", there.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        with world() as made:
            made.run("calm", text=SPEC)
            made.lorad("run", made.spec(SPEC), "--name", "killed", "--detach")
            made.reached("killed", 5)
            os.kill(made.pid("killed", "driver"), signal.SIGKILL)
            assert made.over("killed").reason == "lost"
            there.push(files("R"))
            made.lorad("resume", "killed", "--wait")
            assert made.facts("killed") == made.facts("calm")


def test_changed_file_is_refused_by_name() -> None:
    with world() as made:
        rows = made.root / "rows.jsonl"
        rows.write_bytes(files("S")["data/train-00000-of-00002.jsonl"])
        before = rows.read_bytes()
        made.run("a", f"data.train={rows}", "data.streaming=true", "trainer.steps=2", text=SMALL)
        rows.write_bytes(before.replace(b"S:", b"R:", 1))  # of the same size
        made.lorad("resume", "a", "--steps", 3, "--wait", expect=1)
        failed = made.client.show("a")
        assert failed.reason == "failed" and f"data.train: {rows} is not what it was" in failed.detail
        rows.write_bytes(before)
        made.lorad("resume", "a", "--steps", 3, "--wait")


def test_large_file_is_known_by_ends_and_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reader, "HASHED_BYTES", 100)
    monkeypatch.setattr(reader, "_END_BYTES", 10)
    path = tmp_path / "rows.jsonl"
    lines = b'{"prompt": "a", "answer": "b"}\n' * 10

    def known(content: bytes, at: int) -> str:
        path.write_bytes(content)
        os.utime(path, (at, at))
        return reader.reader_of(str(path), "train", tmp_path).identity

    assert known(lines, 1) == known(lines, 1)
    assert len({known(lines, 1), known(lines, 2), known(lines[:-1] + b" ", 1), known(lines + b"\n", 1)}) == 4
