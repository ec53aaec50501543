"""Boxes of other versions of lorad: copies of this tree with another version, schema or protocol."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.conftest import Box
from tests.kit.world import REPOSITORY

pytestmark = [
    pytest.mark.system,
    # what is asked and answered over the line is the same by both
    pytest.mark.parametrize(
        "box", ["fake", pytest.param("sshd", marks=pytest.mark.long)], indirect=True, scope="module"
    ),
]
NEWER = """
def _of_later(db):
    db.conn.execute("ALTER TABLE runs ADD COLUMN colour TEXT NOT NULL DEFAULT 'green'")
MIGRATIONS(name="m9999_colours")(_of_later)
"""


def _changed(path: Path, pattern: str, text: str) -> None:
    content, count = re.subn(pattern, text, path.read_text(), flags=re.M)
    assert count == 1, path
    path.write_text(content)


@pytest.fixture(scope="module")
def versions(box: Box) -> Iterator[Box]:
    """`later` has another version and schema, and `other` another protocol as well; both daemons run."""
    for number, name in ((2, "later"), (3, "other")):
        tree = box.here / name
        half_written = shutil.ignore_patterns("*.pyc.*")  # what Python has compiled of it goes along
        shutil.copytree(REPOSITORY / "lorad", tree / "lorad", ignore=half_written)
        _changed(tree / "lorad/__init__.py", "^__version__ = .*", f'__version__ = "{number}.0.0"')
        with (tree / "lorad/migrations/__init__.py").open("a") as file:
            file.write(NEWER)
        box.add(name, home=str(box.far.root / name), lorad=box.command(name, tree))
    _changed(box.here / "other/lorad/client/transport.py", "^PROTOCOL = 1\\b", "PROTOCOL = 2")
    for name in ("later", "other"):
        box.lorad("--host", name, "daemon", "start")
    yield box
    for name in ("later", "other"):
        box.lorad("--host", name, "daemon", "stop")
        box.lorad("hosts", "rm", name)


def test_another_version_works_with_a_note(versions: Box) -> None:
    status = json.loads(versions.lorad("--host", "later", "daemon", "status", "--json").stdout)
    assert status["version"] == "2.0.0" and status["database"]["schema"] == "m9999_colours"
    listed = versions.lorad("--host", "later", "list")
    assert "2.0.0" in listed.stderr and "--host later" in listed.stderr
    assert "version" not in versions.there("list").stderr


def test_another_protocol_is_refused(versions: Box) -> None:
    refused = versions.lorad("--host", "other", "list", expect=5)
    assert "lorad on other (version 3.0.0) speaks protocol 2, and this command protocol 1" in refused.stderr
    assert "Install the same version on both" in refused.stderr
    assert json.loads(versions.lorad("--host", "other", "daemon", "status", "--json").stdout)["pid"]
    answers = json.loads(versions.lorad("--host", "all", "list", "--json").stdout)
    assert {"h2", "later"} <= answers["boxes"].keys() and list(answers["errors"]) == ["other"]


def test_an_upgrade_there_is_noticed(versions: Box) -> None:
    """The line is open when lorad there becomes one of another protocol, and its daemon is replaced."""
    source = versions.here / "later/lorad/client/transport.py"
    _changed(source, "^PROTOCOL = 1\\b", "PROTOCOL = 2")
    versions.lorad("--host", "later", "daemon", "restart")
    refused = versions.lorad("--host", "later", "list", expect=5)
    assert "lorad on later (version 2.0.0) speaks protocol 2" in refused.stderr
    assert "Install the same version on both" in refused.stderr
    _changed(source, "^PROTOCOL = 2\\b", "PROTOCOL = 1")
    versions.lorad("--host", "later", "daemon", "restart")
    versions.lorad("--host", "later", "list")
    assert versions.stopped_daemons()
