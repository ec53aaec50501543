"""A gateway in front of a real pool with two versions of a run, for a test file; an official client for each
test.
"""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from lorad.box.paths import Home
from tests.kit.gateway_kit import World, openai, published, running_gateway
from tests.kit.pool_kit import running_pool


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("gateway")
    home = Home(root / "home")
    home.root.mkdir()
    with running_pool(root) as running:
        versions = published(running, root)
        with running_gateway(home) as gateway:
            made = World(home, running, gateway, versions, root)
            made.point("bot", 0)
            yield made


@pytest.fixture
def client(world: World) -> Iterator[OpenAI]:
    world.point("bot", 0)
    with openai(world.home) as client:
        yield client
