"""Bodies of requests are bounded in each of their parts, and what is kept of them does not grow."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from lorad.bounds import OVERRIDES_CHARACTERS
from lorad.daemon.api import verbs
from lorad.daemon.context import request_of
from lorad.errors import SpecError
from lorad.records.requests import RequestBody, ResultRequest
from lorad.selection import Selection
from lorad.store import runs
from tests.daemon.test_daemon import raw
from tests.kit.daemon_world import finished, serving

SIZED = (
    inspect.StrType
    | inspect.BytesType
    | inspect.ListType
    | inspect.VarTupleType
    | inspect.SetType
    | inspect.DictType
)
NUMBERS = {"GenerateRequest.seeds"}  # of 64 bits, which msgspec cannot bound


def bodies() -> list[type[RequestBody]]:
    assert verbs.ROUTES  # whose modules define them
    return sorted(
        RequestBody.__subclasses__()
        + [two for one in RequestBody.__subclasses__() for two in one.__subclasses__()],
        key=str,
    )


def unbounded(kind: inspect.Type, place: str) -> Iterator[str]:
    """Yield the places within a type that hold as much as somebody likes."""
    match kind:
        case inspect.AnyType() | inspect.RawType():
            yield place
        case inspect.StructType():
            for field in kind.fields:
                yield from unbounded(field.type, f"{place}.{field.name}")
        case inspect.UnionType():
            for one in kind.types:
                yield from unbounded(one, place)
        case inspect.IntType() if place not in NUMBERS:
            yield from [place] * (
                None in (kind.ge if kind.gt is None else kind.gt, kind.le if kind.lt is None else kind.lt)
            )
    if isinstance(kind, SIZED) and kind.max_length is None and getattr(kind, "pattern", None) is None:
        yield place
    for inner in ("item_type", "key_type", "value_type"):
        if hasattr(kind, inner):
            yield from unbounded(getattr(kind, inner), place)


def test_every_part_of_a_body_is_bounded() -> None:
    found = [place for body in bodies() for place in unbounded(inspect.type_info(body), body.__name__)]
    assert found == [] and len(bodies()) >= 20


async def test_body_beyond_its_own_bound_is_refused(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        body = msgspec.json.encode({"name": "b", "else": "x" * RequestBody.MOST_BYTES})
        status, answer = await asyncio.to_thread(raw, api.client, "POST", "/v1/runs/a/rename", body)
        assert status == 413 and f"larger than {RequestBody.MOST_BYTES} bytes" in answer.decode()


async def test_edits_keep_one_value_of_each_key(home: Path) -> None:
    async with serving(home) as api:
        await api("limit_group", "night", 0)
        await api.run("a", "resources.group=night", "resources.priority=1")
        await api.until("a", "queued")
        for priority in range(3):
            await api("edit", "a", [f"resources.priority={priority}  # {'x' * 5000}"])
        kept = request_of(runs.get(api.ctx.store, "a")).overrides
        assert [text[:22] for text in kept] == ["resources.group=night", "resources.priority=2  "]
        with pytest.raises(SpecError, match=f"more than {OVERRIDES_CHARACTERS}"):
            await api("edit", "a", [f"resources.priority={n}  # {'x' * 7000}" for n in range(5)])


async def test_newest_results_are_kept_and_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        monkeypatch.setattr("lorad.store.versions.RESULTS", 3)
        for number in range(5):
            await api("keep_result", "a@1006", ResultRequest(str(number) * 400))
        await api("keep_result", "a@1004", ResultRequest("other"))
        assert [one.data[0] for one in await api("results", "a")] == ["2", "3", "4", "o"]
        monkeypatch.setattr("lorad.store.db.ANSWER_PAGE_BYTES", 900)
        assert [one.data[0] for one in await api("results")] == ["3", "4", "o"]
        assert [len(one.results) for one in await api("adapters", "a") if one.results] == [1, 2]
        assert len(await api("history", limit=1000)) < 9


async def test_many_globs_and_names_are_no_defect(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        names = [f"b{number}" for number in range(900)]
        assert [run.name for run in await api("select", Selection(names=[*names, "a"]))] == ["a"]
        assert len(await api("select", Selection(names=[f"a*{n}" for n in range(99)] + ["?"]))) == 1
        with pytest.raises(SpecError, match="101 globs are too many"):
            await api("select", Selection(names=["a*"] * 101))
        with pytest.raises(SpecError, match="does not fit"):
            await api("select", Selection(), keys=["a" + ".a" * 12_000])
        with pytest.raises(SpecError, match="a spec has no key"):
            await api("select", Selection(), keys=["a.a.a"])
