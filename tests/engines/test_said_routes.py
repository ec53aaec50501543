"""What servers say of routes, checked."""

import base64
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lorad.engines.remote.call import all_routes
from lorad.engines.remote.settings import settings_of
from lorad.engines.sglang import replies
from lorad.engines.sglang.dialect import SglangDialect
from lorad.errors import LoradError
from lorad.models.directory import resolve
from lorad.protocol.pool_setup import ServerSetup
from lorad.routes import RouteShape

SHAPE = RouteShape(layers=3, experts=4, per_token=2)
FLAG = "--enable-return-routed-experts"


def test_all_tokens_but_the_last_have_routes() -> None:
    flat = np.arange(24, dtype=np.int32) % 4
    found = all_routes(flat, SHAPE)
    assert found.dtype == np.uint8 and np.array_equal(found[:4].ravel(), flat)
    assert np.array_equal(found[4:], SHAPE.unknown(1))


@pytest.mark.parametrize("wrong", [np.zeros(7, np.int32), np.full(6, 4, np.int32), np.full(6, -1, np.int32)])
def test_routes_of_another_base_are_no_answer(wrong: np.ndarray) -> None:
    with pytest.raises(LoradError, match="as routes, which are not of"):
        all_routes(wrong, SHAPE)


def test_sglang_says_routes_as_little_endian_numbers() -> None:
    said = base64.b64encode(np.array([1, 258], "<i4").tobytes()).decode()
    assert replies.routes(replies.parsed({"meta_info": {"routed_experts": said}})).tolist() == [1, 258]  # type: ignore[union-attr]
    assert replies.routes(replies.parsed({"meta_info": {}})) is None
    for wrong in ("?", "AAAAAAA="):
        with pytest.raises(LoradError, match="routes that lorad does not know"):
            replies.routes(replies.parsed({"meta_info": {"routed_experts": wrong}}))


def test_sglang_is_started_for_wanted_routes() -> None:
    setup = ServerSetup(python="p", max_rank=8, targets=("q_proj",), context_length=64)
    moe = resolve("builtin:tiny-moe")

    def argv(setup: ServerSetup) -> list[str]:
        settings = settings_of(
            setup, model=moe, dtype="float32", device="cpu", threads=1, memory_fraction=0.5, sleep=False
        )
        return SglangDialect().command("python", settings, Path("/s"))

    assert FLAG in argv(replace(setup, routes=True)) and FLAG not in argv(setup)
    assert FLAG.removeprefix("--") in SglangDialect.reserved
