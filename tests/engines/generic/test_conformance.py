"""The engine over transformers keeps the rules of every engine, with its calls apart and mixed."""

from collections.abc import AsyncIterator

import pytest
import torch

from lorad.engines.base import Engine
from lorad.engines.generic.engine import TransformersEngine
from lorad.engines.generic.model import GenericModel
from lorad.models.compute import Compute
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from tests.conformance.engine_suite import EngineSuite
from tests.kit.fakes.random_adapters import Shapes

TINY = resolve("builtin:tiny")


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return read_facts(TINY).linears


@pytest.fixture(scope="module")
def model(shapes: Shapes) -> GenericModel:
    return GenericModel.opened(TINY, torch.float32, torch.device("cpu"), shapes)


class TestCallsMixed(EngineSuite):
    mix_calls = True

    @pytest.fixture
    async def engine(self, model: GenericModel, shapes: Shapes) -> AsyncIterator[Engine]:
        compute = Compute()
        engine = TransformersEngine(
            model, compute, TINY, shapes, cache_bytes=2 << 30, mix_calls=self.mix_calls
        )
        yield engine
        await engine.close()
        compute.close()


@pytest.mark.system
class TestCallsApart(TestCallsMixed):
    mix_calls = False
