"""Bases of the door: what model.path of a spec may be, and what is refused by its key."""

import shutil
from pathlib import Path

import pytest

from lorad.box.config import TinkerSettings, load
from lorad.box.paths import Home
from lorad.errors import SpecError
from lorad.tinker.door.door import _bases_of
from tests.kit.pool_kit import TINY


@pytest.mark.parametrize("base", ["builtin:tiny", "smollm2", "/models/some", "~/some", "org/name@v1"])
def test_what_a_spec_takes_is_a_base(base: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f'tinker: {{port: 8093, bases: {{a/b: "{base}"}}}}\n')
    assert load(path).tinker.bases == {"a/b": base}


@pytest.mark.parametrize("base", ["builtin:huge", "models", "./models/some", ""])
def test_anything_else_is_refused_by_key(base: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f'tinker: {{bases: {{a/b: "{base}"}}}}\n')
    with pytest.raises(SpecError, match=r"bases: a/b: expected .*`\$\.tinker`"):
        load(path)


def test_door_serves_what_it_finds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bases = {"tiny": "builtin:tiny", "gone": str(tmp_path / "gone"), "small": "smollm2"}
    home = Home(tmp_path)
    assert _bases_of(TinkerSettings(bases=bases), home) == {"tiny": TINY}
    shutil.copytree(TINY, home.models / "smollm2")
    assert _bases_of(TinkerSettings(bases=bases), home) == {"tiny": TINY, "small": home.models / "smollm2"}
    assert "tinker.bases of config.yaml: gone is not served" in caplog.text
