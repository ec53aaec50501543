"""An SGLang with a grammar backend follows JSON schemas; one without refuses them, as the suite says."""

from pathlib import Path

import pytest

from tests.conformance.engine_suite import EngineSuite
from tests.engines.real.places import opened


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sglang"], indirect=True)
async def test_a_grammar_backend_follows_schemas(kind: str, work: Path) -> None:
    (work / "grammar").mkdir()
    async with opened(kind, work / "grammar", engine_args={"grammar-backend": "xgrammar"}) as engine:
        assert engine.capabilities().formats
        await EngineSuite().test_a_schema_is_followed_or_refused(engine)
