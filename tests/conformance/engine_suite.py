"""What every rollout engine must do, whatever serves behind it: the rules at the top of
`lorad/engines/base.py`.

A backend's test class derives from `EngineSuite` and gives two fixtures: `engine` and `shapes` (of the base's
linears).
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lorad.adapters.adapter import Adapter
from lorad.adapters.peft import write_peft
from lorad.engines.base import BASE, AdapterSource, Engine
from lorad.errors import AdapterRefused, Conflict, NotFound, SpecError
from lorad.models.directory import resolve
from lorad.protocol.batch import Batch, Chunk, Prompt, Sampling
from lorad.rl.tokenizer import Tokenizer
from tests.kit.fakes.random_adapters import Shapes, random_adapter

Completion = tuple[list[int], list[float], str]


def prompt(name: str = "p", tokens: Sequence[int] = (5, 9, 7, 11), seeds: Sequence[int] = (1,)) -> Prompt:
    return Prompt(name, np.array(tokens, np.int32), np.array(seeds, np.uint64))


def whole(chunks: Iterable[Chunk]) -> dict[tuple[str, int], Chunk]:
    """Return each sample as one chunk: a machine that takes longer than a second hands over several."""
    parts: dict[tuple[str, int], list[Chunk]] = {}
    for chunk in chunks:
        parts.setdefault((chunk.prompt, chunk.index), []).append(chunk)
    return {
        key: replace(
            of_one[-1],
            tokens=np.concatenate([chunk.tokens for chunk in of_one]),
            logprobs=np.concatenate([chunk.logprobs for chunk in of_one]),
        )
        for key, of_one in parts.items()
    }


async def complete(
    engine: Engine, version: str, prompts: Sequence[Prompt], sampling: Sampling, request: str = "r"
) -> dict[tuple[str, int], Completion]:
    """(prompt id, index) -> (tokens, logprobs, finish); checks what holds for every chunk."""
    made: dict[tuple[str, int], Completion] = {}
    async for chunk in engine.generate(request, version, prompts, sampling):
        assert chunk.version == version
        assert chunk.tokens.dtype == np.int32 and chunk.logprobs.dtype == np.float32
        assert chunk.tokens.shape == chunk.logprobs.shape
        tokens, logprobs, finish = made.get((chunk.prompt, chunk.index), ([], [], ""))
        assert not finish, "a chunk came after the last one of its sample"
        made[chunk.prompt, chunk.index] = (
            [*tokens, *chunk.tokens.tolist()],
            [*logprobs, *chunk.logprobs.tolist()],
            chunk.finish or "",
        )
    assert set(made) == {(p.id, i) for p in prompts for i in range(len(p.seeds))}
    return made


CANARY = Batch.of(
    [
        (np.array([5, 9, 7, 11], np.int32), [np.array([8, 6, 10], np.int32), np.array([7], np.int32)]),
        (np.array([12, 4], np.int32), [np.array([9, 9, 5, 13, 6], np.int32)]),
    ]
)
SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], '
    '"additionalProperties": false}'
)
SHORT = Sampling(max_new_tokens=8)
LONG = Sampling(max_new_tokens=200)


class _EngineCase:
    """Subclasses give the fixtures `engine` (an Engine that serves nothing but its base) and `shapes`."""

    tolerance = 1e-4  # of log-probabilities between two ways to compute them
    eos = 1  # a token id for the stop tests; any will do

    async def load(
        self, engine: Engine, name: str, adapter: Adapter, tmp_path: Path, digest: str = ""
    ) -> None:
        digest = digest or adapter.digest()
        if engine.capabilities().memory_source:
            source = AdapterSource(digest, adapter=adapter)
        else:
            directory = tmp_path / name
            directory.mkdir(parents=True)
            write_peft(adapter, directory, "base")
            source = AdapterSource(digest, directory=directory)
        loaded = await engine.load(name, source)
        assert (loaded.name, loaded.digest) == (name, adapter.digest())

    def same(self, a: np.ndarray, b: np.ndarray, engine: Engine) -> bool:
        if engine.capabilities().bit_stable:
            return bool((a == b).all())
        return bool(np.abs(a - b).max() <= self.tolerance)


class Answers(_EngineCase):
    """The rules of what is answered, which hang on how a base computes."""

    async def test_a_sample_is_decided_by_its_seed(self, engine: Engine) -> None:
        first = await complete(engine, BASE, [prompt(seeds=[3, 4, 2**64 - 1])], SHORT)
        again = await complete(engine, BASE, [prompt(seeds=[3, 4, 2**64 - 1])], SHORT)
        other = await complete(engine, BASE, [prompt(seeds=range(10, 20))], SHORT)
        assert {key: made[0] for key, made in first.items()} == {key: made[0] for key, made in again.items()}
        assert len({tuple(tokens) for tokens, _, _ in other.values()}) > 1

    async def test_a_sample_does_not_depend_on_its_neighbours(self, engine: Engine) -> None:
        alone = await complete(engine, BASE, [prompt(seeds=[3])], SHORT)
        among = await complete(engine, BASE, [prompt("q", [4, 4], [8, 9]), prompt(seeds=[3, 5, 6])], SHORT)
        assert among["p", 0][0] == alone["p", 0][0]

    async def test_sampled_logprobs_equal_scores(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        await self.load(engine, "run@1", random_adapter(shapes, 1), tmp_path)
        for version in (BASE, "run@1"):
            made = await complete(engine, version, [prompt(seeds=[1, 2])], SHORT)
            completions = [np.array(made["p", index][0], np.int32) for index in range(2)]
            scores = await engine.score(version, Batch.of([(prompt().tokens, completions)]))
            logprobs = np.concatenate([made["p", index][1] for index in range(2)])
            assert np.abs(scores - logprobs).max() <= self.tolerance

    async def test_ranks_agree_with_scores_and_greedy_samples(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        await self.load(engine, "run@1", random_adapter(shapes, 1), tmp_path)
        text, greedy = prompt().tokens, Sampling(max_new_tokens=2, temperature=0.0)
        for version in (BASE, "run@1"):
            made = np.array((await complete(engine, version, [prompt()], greedy))["p", 0][0], np.int32)
            whole = np.concatenate([text, made])
            found = await engine.ranked(version, [whole, text, text[:1]], [1, 3, 1], 3)
            assert found.logprobs.shape == (6,) and found.top_tokens.shape == found.top_logprobs.shape == (
                6,
                3,
            )
            scores = await engine.score(version, Batch.of([(whole[:1], [whole[1:]])]))
            assert np.abs(found.logprobs[:5] - scores).max() <= self.tolerance
            assert np.abs(found.logprobs[2] - found.logprobs[5]) <= self.tolerance
            assert found.top_tokens[3:5, 0].tolist() == made.tolist()
            assert (found.top_logprobs[3:5, 0] == found.logprobs[3:5]).all()
            assert (np.diff(found.top_logprobs) <= 0).all()
        assert (await engine.ranked(BASE, [text], [1], 0)).top_tokens.shape == (3, 0)
        with pytest.raises(NotFound):
            await engine.ranked("run@7", [text], [1], 1)

    async def test_greedy_takes_the_most_likely_token(self, engine: Engine) -> None:
        greedy = Sampling(max_new_tokens=1, temperature=0.0)
        made = (await complete(engine, BASE, [prompt()], greedy))["p", 0]
        sampled = await complete(engine, BASE, [prompt(seeds=range(64))], Sampling(max_new_tokens=1))
        assert made[1][0] >= max(logprobs[0] for _, logprobs, _ in sampled.values()) - self.tolerance
        top_k = Sampling(max_new_tokens=1, top_k=1)
        assert (await complete(engine, BASE, [prompt()], top_k))["p", 0][0] == made[0]

    async def test_stop_token_ends_and_belongs_to_its_sample(self, engine: Engine) -> None:
        free = (await complete(engine, BASE, [prompt()], SHORT))["p", 0]
        stop = free[0][3]
        limited = Sampling(max_new_tokens=8, stop_token_ids=(stop,))
        tokens, _, finish = (await complete(engine, BASE, [prompt()], limited))["p", 0]
        assert (tokens, finish) == (free[0][: free[0].index(stop) + 1], "stop")
        assert free[2] == "length" and len(free[0]) == 8

    async def test_a_schema_is_followed_or_refused(self, engine: Engine) -> None:
        asked = Sampling(max_new_tokens=60, stop_token_ids=(self.eos,), schema=SCHEMA)
        if not engine.capabilities().formats:
            with pytest.raises(SpecError, match="follows no JSON schema"):
                await complete(engine, BASE, [prompt()], asked)
            return
        decode = Tokenizer(resolve("builtin:tiny")).decode
        made = await complete(engine, BASE, [prompt(seeds=range(8))], asked)
        texts = [decode(tokens) for tokens, _, finish in made.values() if finish == "stop"]
        assert texts and all(json.loads(text)["a"] in (1, 22) for text in texts)

    async def test_version_without_load_is_never_served(self, engine: Engine) -> None:
        with pytest.raises(NotFound):
            await complete(engine, "run@7", [prompt()], SHORT)
        with pytest.raises(NotFound):
            await engine.score("run@7", CANARY)

    async def test_too_long_a_request_is_refused(self, engine: Engine) -> None:
        with pytest.raises(ValueError, match="exceed"):
            await complete(
                engine, BASE, [prompt()], Sampling(max_new_tokens=engine.capabilities().max_tokens)
            )

    async def test_versions_differ_from_base_and_each_other(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        for number in (1, 2):
            await self.load(engine, f"run@{number}", random_adapter(shapes, number), tmp_path)
        scores = [await engine.score(version, CANARY) for version in (BASE, "run@1", "run@2")]
        for a, b in ((0, 1), (1, 2), (0, 2)):
            assert np.abs(scores[a] - scores[b]).max() > 100 * self.tolerance
        assert sorted(version.name for version in await engine.loaded()) == ["run@1", "run@2"]

    async def test_a_copy_under_another_name_gives_the_same(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        for name in ("run@1", "copy@1"):
            await self.load(engine, name, random_adapter(shapes, 1), tmp_path)
        assert self.same(await engine.score("run@1", CANARY), await engine.score("copy@1", CANARY), engine)

    async def test_loads_and_unloads_leave_the_base_alone(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        before = await engine.score(BASE, CANARY)
        await self.load(engine, "run@1", random_adapter(shapes, 1), tmp_path)
        during = await engine.score(BASE, CANARY)
        await engine.unload("run@1")
        for later in (during, await engine.score(BASE, CANARY)):
            assert self.same(before, later, engine)

    async def test_a_name_is_never_used_twice(self, engine: Engine, shapes: Shapes, tmp_path: Path) -> None:
        await self.load(engine, "run@1", random_adapter(shapes, 1), tmp_path)
        for number in (1, 2):
            with pytest.raises(Conflict):
                await self.load(engine, "run@1", random_adapter(shapes, number), tmp_path / f"again{number}")
            if number == 1:
                await engine.unload("run@1")
        with pytest.raises(Conflict):
            await self.load(engine, BASE, random_adapter(shapes, 1), tmp_path)

    @pytest.mark.parametrize("fault", ["digest", "nan", "shape", "module"])
    async def test_a_failed_load_changes_nothing(
        self, engine: Engine, shapes: Shapes, tmp_path: Path, fault: str
    ) -> None:
        await self.load(engine, "run@1", random_adapter(shapes, 1), tmp_path)
        before = await engine.score("run@1", CANARY)
        adapter, digest = broken(random_adapter(shapes, 2), fault)
        with pytest.raises(AdapterRefused):
            await self.load(engine, "run@2", adapter, tmp_path, digest)
        assert [version.name for version in await engine.loaded()] == ["run@1"]
        assert self.same(before, await engine.score("run@1", CANARY), engine)
        with pytest.raises(NotFound):
            await engine.score("run@2", CANARY)
        await self.load(engine, "run@2", random_adapter(shapes, 2), tmp_path / "good")

    async def test_concurrent_calls_on_several_versions_are_independent(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        versions = [BASE, "a@1", "b@1"]
        for seed, version in enumerate(versions[1:]):
            await self.load(engine, version, random_adapter(shapes, seed), tmp_path)
        work = [prompt(seeds=[1, 2, 3]), prompt("q", [4, 4, 6], [9])]
        alone = [await complete(engine, version, work, SHORT) for version in versions]
        together = await asyncio.gather(*(complete(engine, v, work, SHORT, request=v) for v in versions))
        for one, other in zip(alone, together, strict=True):
            assert {key: made[0] for key, made in one.items()} == {
                key: made[0] for key, made in other.items()
            }

    async def test_sleep_gives_way_and_wake_serves_the_same(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        if not engine.capabilities().sleep:
            with pytest.raises(Conflict):
                await engine.sleep()
            return
        await self.load(engine, "run@1", random_adapter(shapes, 1), tmp_path)
        before = [await engine.score(version, CANARY) for version in (BASE, "run@1")]
        await engine.sleep()
        assert (await engine.health()).asleep
        await engine.wake()
        for version, scores in zip((BASE, "run@1"), before, strict=True):
            assert self.same(scores, await engine.score(version, CANARY), engine)


class Traffic(_EngineCase):
    """The rules of requests in flight, which its base does not matter to."""

    async def test_unload_waits_for_requests_in_flight(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        await self.load(engine, "run@1", random_adapter(shapes, 1), tmp_path)
        stream = engine.generate("r", "run@1", [prompt(seeds=range(4))], LONG)
        first = await anext(stream)
        unload = asyncio.create_task(engine.unload("run@1"))
        counts = np.zeros(4, np.int64)
        counts[first.index] += len(first.tokens)
        async for chunk in stream:
            assert not unload.done()
            counts[chunk.index] += len(chunk.tokens)
        await unload
        assert (counts == 200).all()
        assert list(await engine.loaded()) == []
        with pytest.raises(NotFound):
            await engine.unload("run@1")

    async def test_abort_ends_unfinished_samples_but_not_the_engine(self, engine: Engine) -> None:
        ends: dict[int, str] = {}
        for _ in range(5):  # a server that is quick may have ended all of them before it hears of the abort
            made: dict[int, list[int]] = {}
            ends = {}
            async for chunk in engine.generate("doomed", BASE, [prompt(seeds=range(8))], LONG):
                if not made:
                    await engine.abort("doomed")
                made.setdefault(chunk.index, []).extend(chunk.tokens.tolist())
                ends |= {chunk.index: chunk.finish} if chunk.finish else {}
            assert len(ends) == 8
            for index, end in ends.items():
                assert (len(made[index]) == LONG.max_new_tokens) == (end == "length")
            if "abort" in ends.values():
                break
        assert "abort" in ends.values()
        await engine.abort("unknown")
        await engine.drain()
        assert (await complete(engine, BASE, [prompt()], SHORT))["p", 0][2] == "length"

    async def test_drain_waits_for_what_is_in_flight(self, engine: Engine) -> None:
        call = asyncio.create_task(complete(engine, BASE, [prompt(seeds=range(4))], LONG))
        while not (await engine.health()).running and not call.done():  # noqa: ASYNC110 (health is polled)
            await asyncio.sleep(0.001)
        await engine.drain()
        assert (await engine.health()).running == 0
        assert all(finish == "length" for _, _, finish in (await call).values())

    async def test_many_swaps_leave_nothing_behind(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        for number in range(20):
            await self.load(engine, f"run@{number}", random_adapter(shapes, number), tmp_path)
            made = await complete(
                engine, f"run@{number}", [prompt(seeds=range(8))], Sampling(max_new_tokens=2)
            )
            assert len(made) == 8
            await engine.unload(f"run@{number}")
        assert list(await engine.loaded()) == []

    async def test_swaps_under_load_fail_and_mix_nothing(
        self, engine: Engine, shapes: Shapes, tmp_path: Path
    ) -> None:
        made: list[tuple[int, int, Completion]] = []  # version, seed, sample
        current, swapping = 0, True

        async def user(first: int) -> None:
            seed = first
            while swapping:
                version = current
                sampled = await complete(
                    engine, f"run@{version}", [prompt(seeds=[seed])], SHORT, f"user{seed}"
                )
                made.append((version, seed, sampled["p", 0]))
                seed += 4

        await self.load(engine, "run@0", random_adapter(shapes, 0), tmp_path)
        users = [asyncio.create_task(user(first)) for first in range(4)]
        for number in range(1, 6):
            seen = len(made)
            await self.load(engine, f"run@{number}", random_adapter(shapes, number), tmp_path)
            current = number
            await engine.unload(f"run@{number - 1}")
            while len(made) < seen + 4:  # noqa: ASYNC110 (of the users)
                await asyncio.sleep(0.005)
        swapping = False
        await asyncio.gather(*users)
        for number in range(6):
            await self.load(engine, f"again@{number}", random_adapter(shapes, number), tmp_path)
            for _, seed, (tokens, logprobs, _) in [m for m in made if m[0] == number][:3]:
                again = (await complete(engine, f"again@{number}", [prompt(seeds=[seed])], SHORT))["p", 0]
                assert again[0] == tokens and np.abs(np.subtract(again[1], logprobs)).max() <= self.tolerance


class EngineSuite(Answers, Traffic):
    """Every rule."""


def broken(adapter: Adapter, fault: str) -> tuple[Adapter, str]:
    """An adapter that no engine may load, and the digest that is claimed for it."""
    first = sorted(adapter.tensors)[0]
    tensors = {name: tensor.copy() for name, tensor in adapter.tensors.items()}
    if fault == "digest":
        return adapter, "0" * 64
    if fault == "nan":
        tensors[first][0, 0] = np.nan
    elif fault == "shape":
        tensors[first] = np.ascontiguousarray(tensors[first][:, :-1])
    else:
        tensors.pop(first)
    changed = Adapter(adapter.config, tensors)
    return changed, changed.digest()
