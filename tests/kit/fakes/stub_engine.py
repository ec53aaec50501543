"""An engine whose servers are `stub_server.py`."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lorad.engines.remote.dialect import Abilities, Dialect, Metrics, SamplePiece, ServerSettings
from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.remote.http import Http
from lorad.protocol.batch import Ranked, Sampling
from lorad.servers.kind import ServerKind
from tests.kit.fakes import stub_server


class StubDialect(Dialect):
    """A sample is one token again and again, in one piece; each takes a tenth of a second."""

    kind = ServerKind(name="stub", title="stub", engine="", dialect="", distributions=("stub",), tried="1")
    reserved = frozenset()

    def command(self, python: str, settings: ServerSettings, socket: Path) -> list[str]:
        return [python, stub_server.__file__, str(socket)]

    def environment(self, settings: ServerSettings) -> dict[str, str]:
        return {"STUB_DEVICES": ",".join(settings.visible)}

    def check(self, sampling: Sampling, settings: ServerSettings) -> str:
        return ""

    async def is_ready(self, http: Http) -> bool:
        return await http.status("/ready") < 300

    is_alive = is_ready

    async def abilities(self, http: Http) -> Abilities:
        return Abilities("1", 64, lora=True, sleep=True)

    async def load(self, http: Http, name: str, directory: Path) -> None:
        await http.post("/load", {"name": name, "path": str(directory)})

    async def unload(self, http: Http, name: str) -> None:
        await http.post("/unload", {"name": name})

    async def loaded(self, http: Http) -> dict[str, str]:
        found: dict[str, str] = await http.get("/loaded")
        return found

    async def sample(
        self,
        http: Http,
        request: str,
        version: str | None,
        prompt: Sequence[int],
        seed: int,
        sampling: Sampling,
    ) -> AsyncIterator[SamplePiece]:
        token = await http.post("/sample", {"version": version, "seconds": sampling.max_new_tokens / 10})
        count = sampling.max_new_tokens
        yield SamplePiece([token] * count, [-1.0] * count, "length")

    async def abort(self, http: Http, requests: Sequence[str]) -> None: ...

    async def score(
        self, http: Http, request: str, version: str | None, prompt: Sequence[int], completion: Sequence[int]
    ) -> np.ndarray:
        said = await http.post("/score", {"version": version})
        return np.full(len(completion), said, np.float32)

    async def ranked(self, *_: Any) -> Ranked:
        raise NotImplementedError

    async def flush(self, http: Http) -> bool:
        return True

    async def sleep(self, http: Http) -> None: ...

    async def wake(self, http: Http) -> None: ...

    async def metrics(self, http: Http) -> Metrics:
        return Metrics()


class StubEngine(RemoteEngine):
    dialect = StubDialect
