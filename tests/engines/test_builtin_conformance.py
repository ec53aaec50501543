"""The builtin engine keeps the rules of every engine, with its calls apart and mixed into one batch."""

import shutil
from collections.abc import AsyncIterator

import pytest
import torch

from lorad.engines.base import Engine
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import linear_shapes, resolve
from lorad.models.loading import load_base
from tests.conformance.engine_suite import Answers, EngineSuite, Traffic
from tests.kit.fakes.random_adapters import Shapes
from tests.models.bases import write_hybrid

TINY, MIXTURE = resolve("builtin:tiny"), resolve("builtin:tiny-moe")


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(TINY, torch.float32, torch.device("cpu"))


@pytest.fixture
def shapes(base: Base) -> Shapes:
    return linear_shapes(base.config)


class _Builtin:
    model, mix_calls = TINY, False

    @pytest.fixture
    async def engine(self, base: Base) -> AsyncIterator[Engine]:
        compute = Compute()
        engine = BuiltinEngine(base, compute, self.model, mix_calls=self.mix_calls)
        yield engine
        await engine.close()
        compute.close()


class TestCallsApart(_Builtin, EngineSuite):
    pass


class TestCallsMixed(_Builtin, EngineSuite):
    mix_calls = True


class _Mixture(_Builtin):
    model, mix_calls = MIXTURE, True

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls) -> Base:
        return load_base(cls.model, torch.float32, torch.device("cpu"))


@pytest.mark.system
class TestMixtureOfExperts(_Mixture, Answers):
    pass


@pytest.mark.long
class TestTrafficOfMixture(_Mixture, Traffic):
    """`TestCallsMixed` has it in `make test`."""


class _Hybrid(_Builtin):
    """Gated delta nets beside gated attention."""

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Base:
        directory = tmp_path_factory.mktemp("hybrid")
        write_hybrid(directory)
        for file in TINY.glob("*tokenizer*"):
            shutil.copy(file, directory / file.name)
        cls.model = directory
        return load_base(directory, torch.float32, torch.device("cpu"))


@pytest.mark.long
class TestHybrid(_Hybrid, EngineSuite):
    """Each call is a batch: those of `TestHybridMixed` have several rows, too."""


@pytest.mark.system
class TestHybridMixed(_Hybrid, EngineSuite):
    mix_calls = True
