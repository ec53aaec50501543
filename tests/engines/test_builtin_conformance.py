"""The builtin engine keeps the rules of every engine, with its calls apart and mixed into one batch."""

from collections.abc import AsyncIterator

import pytest
import torch

from lorad.engines.base import Engine
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import linear_shapes, resolve
from lorad.models.loading import load_base
from tests.conformance.engine_suite import EngineSuite
from tests.kit.fakes.random_adapters import Shapes

TINY = resolve("builtin:tiny")


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(TINY, torch.float32, torch.device("cpu"))


@pytest.fixture
def shapes(base: Base) -> Shapes:
    return linear_shapes(base.config)


class TestCallsApart(EngineSuite):
    mix_calls = False

    @pytest.fixture
    async def engine(self, base: Base) -> AsyncIterator[Engine]:
        compute = Compute()
        engine = BuiltinEngine(base, compute, TINY, mix_calls=self.mix_calls)
        yield engine
        await engine.close()
        compute.close()


class TestCallsMixed(TestCallsApart):
    mix_calls = True
