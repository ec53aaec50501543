"""Who waits for an answer is told what is being done."""

import asyncio
from pathlib import Path

import pytest

from lorad.daemon.api import lines
from lorad.errors import SpecError
from lorad.records.requests import RunRequest
from tests.daemon.serving.test_serve import adapter_in, serve
from tests.kit.daemon_world import SPEC, serving


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "SECONDS", 0.01)


async def test_a_request_tells_what_it_waits_for(home: Path, tmp_path: Path) -> None:
    words = list[str]()
    async with serving(home) as api:
        api.client.telling(words.append)
        served = await serve(api, bot=adapter_in(tmp_path / "bot"))
    assert served.aliases[0].alias == "bot"
    assert "checking the spec" in words and "waiting for pool tiny-1" in words and words[-1] == ""


async def test_an_error_in_the_last_line_is_raised(home: Path) -> None:
    words = list[str]()
    async with serving(home) as api:
        api.client.telling(words.append)
        with pytest.raises(SpecError, match="unlucky") as raised:
            await api.run("a", "lora.rank=13")
    assert raised.value.hint == "Take another." and words[-1] == ""


async def test_only_who_asks_gets_lines(home: Path) -> None:
    async with serving(home) as api:
        kinds = []
        for name in ("a", "b"):
            body = RunRequest(SPEC, "a.yaml", "/", [], name)
            answer = await asyncio.to_thread(api.client._http.request, "POST", "/v1/runs", body)
            answer.file.close()
            kinds.append(answer.headers["content-type"])
            api.client.telling(lambda words: None)
    assert kinds == ["application/json", "application/x-ndjson"]
