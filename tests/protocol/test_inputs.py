"""Files that an attempt read, compared with what they are now."""

from pathlib import Path

from lorad.protocol.inputs import Input, changes, look


def test_only_files_are_looked_for_again(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = {
        "reward": look(tmp_path / "a.py"),
        "env.name": Input("verifiers:sums (verifiers 0.3.1)", 0, 0, "ab"),
        "data.train": Input(str(tmp_path / "gone.jsonl"), 7, 7),
    }
    (tmp_path / "a.py").write_text("22")
    reward, data = changes(before)
    assert "reward: " in reward and "is not what it was in" in reward and "cannot be read any more" in data
