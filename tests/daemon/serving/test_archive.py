"""A version as an archive: whoever asks for it holds up nobody."""

import asyncio
from pathlib import Path

import pytest

from lorad.bounds import Bounds
from lorad.box.paths import Home
from lorad.daemon.api.verbs import versions as verbs
from tests.kit.daemon_world import finished, serving, until

REQUEST = b"GET /v1/versions/a@1001/archive HTTP/1.1\r\nHost: lorad\r\n\r\n"


async def test_who_does_not_read_is_dropped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "_verify_files", lambda *_: ("large",))
    async with serving(home, bounds=Bounds(write=0.1)) as api:
        finished(api.ctx)
        (home / "runs/a/versions/001001/large").write_bytes(bytes(16 << 20))
        reader, writer = await asyncio.open_unix_connection(Home(home).socket, limit=1)
        writer.write(REQUEST)
        await until(lambda: "a@1001" in api.ctx.serving.in_hand)
        await until(lambda: not api.ctx.serving.in_hand)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(16 << 20)
        writer.close()
