"""The dashboard here shows the daemon of another box, over ssh.

The cases with a real sshd have mark.system.
"""

from pathlib import Path

import pytest

from lorad.box.paths import Home
from lorad.client.client import Client
from lorad.tui.app import LoradApp
from tests.hosts.conftest import Box
from tests.kit.tui_world import line, screen_text, until


async def test_a_box_is_shown_over_ssh(box: Box, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LORAD_HOME", raising=False)
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)
    app = LoradApp(Client(Home(tmp_path)))
    async with app.run_test(size=(120, 36)) as user:
        await until(user, lambda: "No daemon since" in screen_text(user))
        await user.press("colon", *"boxes", "enter")
        await until(user, lambda: "1 of 2 boxes answer" in screen_text(user))
        await user.press("j", "enter")
        await until(user, lambda: " h2 " in screen_text(user) and "No runs yet" in screen_text(user))
        await until(user, lambda: line(user, "#status") == "$ lorad --host h2 list")
        calls = box.ssh_calls
        app.feed.again()
        await until(user, lambda: "devices" in screen_text(user))
        assert box.ssh_calls == calls
        box.kill("master")
        await until(user, lambda: box.ssh_calls > calls and not app.lost)
        assert not (tmp_path / "lorad.sock").exists() and box.stopped_daemons()
