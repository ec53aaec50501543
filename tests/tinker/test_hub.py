"""The tokenizer files of a door's bases, as the client of the Hugging Face hub asks for them."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from lorad.tinker.door.routes.hub import add_hub
from tests.kit.pool_kit import TINY


@pytest.mark.parametrize("name", ["tiny/base", "smollm2"])
async def test_bases_are_found_with_and_without_owners(name: str) -> None:
    app = web.Application()
    add_hub(app, {name: TINY})
    async with TestClient(TestServer(app)) as client:
        config = await client.get(f"/{name}/resolve/main/config.json")
        assert json.loads(await config.read()) == json.loads((TINY / "config.json").read_text())
        for place in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
            assert (await (await client.get(place)).json())["id"] == name
        files = await (await client.get(f"/api/models/{name}/tree/main")).json()
        assert "tokenizer.json" in {file["path"] for file in files}
