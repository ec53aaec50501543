"""Rollout routing replay: samples carry their routes to the trainer, whatever happens between."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from lorad.driver import pending
from lorad.driver.begin import records_routes
from lorad.driver.sampling.routes import routes_in, routes_of, with_prompts, with_routes
from lorad.driver.session import Episode, Sample
from lorad.errors import Conflict
from lorad.models.directory import resolve
from lorad.protocol.batch import Chunk
from lorad.records.episodes import Fork, Task
from lorad.rl.data import Example
from lorad.routes import RouteShape, is_unknown
from lorad.spec.text import load_spec
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool

HOW = (
    "rollout={routes: record, max_new_tokens: 8, max_staleness: 1}",
    "eval.every=0",
    "lora.dropout=0",
    "checkpoint.every=2",
)
SHAPE = RouteShape(2, 8, 2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    mixture = {"model": "builtin:tiny-moe", "model_path": str(resolve("builtin:tiny-moe"))}
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True, **mixture) as pool:
        yield pool


def routes(run: Driven) -> list[tuple[float, float]]:
    metrics = [r.data["metrics"] for r in run.facts("step")]
    return [(m["routes_differ"], m["routes_unknown"]) for m in metrics if "routes_differ" in m]


@pytest.mark.system
def test_killed_and_resumed_equals_undisturbed(running: Running, tmp_path: Path) -> None:
    calm, killed = (Driven(running, tmp_path, name, *HOW) for name in ("calm", "killed"))
    assert calm.drive().reason == "completed"
    assert killed.struck(5, signal.SIGKILL) == -signal.SIGKILL
    assert killed.drive().reason == "completed"
    assert killed.facts("attempt")[-1].data["resumed_from"] in (4, 6)  # whose next steps have gradients
    assert killed.outcome() == calm.outcome()
    assert routes(killed) == routes(calm) != []
    assert {unknown for _, unknown in routes(calm)} == {0.0}
    assert routes(calm)[0][0] == 0  # the only step whose version is the newest
    assert calm.facts("attempt")[0].data["routes"] == "record"


@pytest.mark.system
def test_episodes_replay_every_token(running: Running, tmp_path: Path) -> None:
    how = ("data.train=lookup", "env={name: lookup, turns: 3}", "trainer.steps=2", "rollout.max_staleness=0")
    run = Driven(running, tmp_path, "lookup", *HOW, *how)
    assert run.drive().reason == "completed"
    found = routes(run)
    assert found and all(unknown < 0.05 and differ == 0 for differ, unknown in found)


def chunk(size: int, start: int = 0) -> Chunk:
    """Routes that say their own place, of which the last one is not known."""
    given = np.arange(start, start + size, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    given[-1] = 255
    nothing = np.zeros(0, np.int32)
    return Chunk("0", 0, "v", nothing, nothing.astype(np.float32), "stop", given)


def places(given: np.ndarray) -> list[int]:
    return [int(row[0, 0]) for row in given]


def test_rows_keep_the_routes_of_their_samples() -> None:
    first = with_routes(None, [chunk(5)], context=3, tokens=2)
    assert first is not None and places(first) == [0, 1, 2, 3, 255]
    then = with_routes(first, [chunk(9, start=100)], context=7, tokens=2)
    assert then is not None and places(then) == [0, 1, 2, 3, 104, 105, 106, 107, 255]
    found, prompts = routes_of([then, None], [(3, 8), (2, 1)])
    assert found is not None and places(found) == [3, 104, 105, 106, 107, 255, 255, 255, 255]
    assert [places(prompt) for prompt in prompts] == [[0, 1, 2], [255, 255]]


def sample(index: int, size: int, prompt: list[int], **changes: Any) -> Sample:
    tokens = np.zeros(size, np.int32)
    numbers = tokens.astype(np.float32)
    rng = np.random.default_rng([index, size])
    known = [rng.integers(0, 8, (n, 2, 2), np.uint8) for n in (size, len(prompt))]
    example = Example("one", "", "", prompt, {})
    made = Sample(
        example, index, "v", tokens, numbers, "stop", "", routes=known[0], prompt_routes=(known[1],)
    )
    return replace(made, **changes)


def test_samples_without_the_first_keep_its_prompt() -> None:
    group = with_prompts([sample(0, 4, [1, 2, 3]), sample(1, 5, [1, 2, 3])])
    whole, rest = routes_in([group]), routes_in([group[1:], [sample(0, 2, [9])]])
    assert whole is not None and rest is not None
    assert np.array_equal(rest.prompts[:3], whole.prompts)
    assert (len(rest.prompts), len(rest.completions)) == (4, 7)
    unrouted = routes_in([[replace(group[0], routes=None, prompt_routes=())], group[1:]])
    assert unrouted is not None and is_unknown(unrouted.completions).tolist() == [True] * 4 + [False] * 5


@pytest.mark.parametrize("is_episode", [False, True])
def test_a_checkpoint_gives_samples_their_routes_back(is_episode: bool) -> None:
    group = [sample(0, 4, [1, 2]), sample(1, 5, [1, 2]), sample(2, 3, [1, 2])]
    if is_episode:
        kept = Episode(Task({}, 0), [], "done")
        more = {"episode": kept, "forks": (Fork(2, [4, 5, 6]),)}
        extra = np.full((3, 2, 2), 7, np.uint8)
        group = [replace(s, **more, prompt_routes=(*s.prompt_routes, extra)) for s in group]
    else:
        group = with_prompts(group)
    kept_routes = pending._KeptRoutes.of(group)
    bare = [replace(s, routes=None, prompt_routes=()) for s in group]
    assert kept_routes is not None
    for before, after in zip(group, kept_routes.added_to(bare), strict=True):
        assert before.routes is not None and after.routes is not None
        assert np.array_equal(before.routes, after.routes)
        assert len(before.prompt_routes) == len(after.prompt_routes)
        assert all(map(np.array_equal, before.prompt_routes, after.prompt_routes))
    assert pending._KeptRoutes.of(bare) is None


@pytest.mark.parametrize("wanted", ["auto", "record", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("able", [True, False])
def test_auto_records_in_bfloat16_where_it_can(wanted: str, dtype: str, able: bool) -> None:
    warned: list[str] = []
    spec = load_spec("data: {train: sort}", overrides=[f"rollout.routes={wanted}"])
    session: Any = SimpleNamespace(spec=spec, warn=warned.append)
    info: Any = SimpleNamespace(dtype=dtype, experts=8, routes=able, engine="e", trainer="t", pool="p")
    is_due = wanted == "record" or (wanted, dtype) == ("auto", "bfloat16")
    if wanted == "record" and not able:
        with pytest.raises(Conflict, match="do not record and replay routes"):
            records_routes(session, info)
        return
    assert records_routes(session, info) is (is_due and able)
    assert bool(warned) is (is_due and not able)
    assert not records_routes(session, SimpleNamespace(**{**vars(info), "experts": 0}))  # type: ignore[arg-type]
