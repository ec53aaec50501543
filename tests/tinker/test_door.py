"""The door over HTTP: order, repeats, errors and refusals, with lanes that only echo."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from lorad.errors import DaemonUnreachable, SpecError
from lorad.tinker.door import sampling
from lorad.tinker.door.messages import M
from lorad.tinker.door.routes.hub import add_hub
from lorad.tinker.records import Pass, Refused
from tests.kit.pool_kit import TINY
from tests.tinker.door_kit import BASE, World, a_pass, home_with_keys, put, running_door


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_door(home_with_keys(tmp_path / "home")) as world:
        yield world


async def test_requests_are_done_in_order(world: World) -> None:
    alice = world.alice
    model = await alice.model(await alice.session())
    third = await alice.send("optim_step", model, 3, adam_params={"learning_rate": 1e-3})
    second = await alice.forward_backward(model, 2)
    assert (await alice.ask("retrieve_future", {"request_id": third}, status=408))["type"] == "try_again"
    first = await alice.forward_backward(model, 1)
    assert await alice.result(third) == {"metrics": {"seq": 3.0}}
    output = M["ForwardBackwardOutput"].FromString(await alice.result(second))
    assert output.metrics["loss:sum"] == 2.0
    field = output.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(field.offsets, np.int64).tolist() == [0, 12, 20]
    assert first == f"{model}:1"
    [run] = world.lanes.done
    assert [request.seq for request in world.lanes.done[run]] == [0, 1, 2, 3]


async def test_a_repeated_request_has_the_same_future(world: World) -> None:
    alice = world.alice
    model = await alice.model(await alice.session())
    first = await alice.forward_backward(model, 1)
    again = await alice.forward_backward(model, 1)
    assert first == again and await alice.result(first) == await alice.result(again)
    other = a_pass(model, 1, forward_only=True)
    assert "was another one" in await alice.forward_backward(model, 1, other, status=400)
    assert [request.seq for request in next(iter(world.lanes.done.values()))] == [0, 1]


async def test_a_repeated_sampler_keeps_its_first_name(world: World) -> None:
    alice = world.alice
    session = await alice.session()
    model = await alice.model(session)
    verb = "save_weights_for_sampler"
    first = await alice.send(verb, model, 1, sampling_session_seq_id=4)
    assert await alice.send(verb, model, 1, sampling_session_seq_id=5) == first
    assert (await alice.result(first))["sampling_session_id"] == f"{session}:sample:4"
    info = await alice.ask(f"samplers/{session}:sample:4", method="GET")
    assert info["base_model"] == BASE


def wrong_token(message: Any) -> None:
    message.data[1].model_input[0].encoded_text.tokens = np.array([10**6, 1], np.int32).tobytes()


def image(message: Any) -> None:
    message.data[0].model_input.add().image.data = b"x"


def short_weights(message: Any) -> None:
    put(message.data[0], "weights", np.ones(2, np.float32))


def useless(message: Any) -> None:
    put(message.data[0], "advantages", np.ones(3, np.float32))


def unknown_setting(message: Any) -> None:
    message.loss_fn_config["kl_beta"] = 0.1


def stable(message: Any) -> None:
    message.loss_fn = "stable_reinforce"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_token, "data[1]: model_input has the token 1000000"),
        (image, "data[0]: model_input has a chunk of image"),
        (short_weights, "weights"),
        (useless, "advantages would change nothing"),
        (unknown_setting, "has no kl_beta"),
        (stable, "loss_fn=importance_sampling"),
    ],
)
async def test_a_bad_pass_fails_in_its_turn(world: World, change: Any, words: str) -> None:
    alice = world.alice
    model = await alice.model(await alice.session())
    request = await alice.forward_backward(model, 1, a_pass(model, 1, change))
    failed = await alice.result(request)
    assert failed["category"] == "user" and words in failed["error"]
    refused = next(iter(world.lanes.done.values()))[1].arguments
    assert isinstance(refused, Refused) and refused.poisons


@pytest.mark.parametrize(
    ("verb", "body", "words"),
    [
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "negative or not finite"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "there is no other optimizer"),
        ("optim_step", {"adam_params": {"learning_rate": 1.0, "amsgrad": True}}, "amsgrad would change"),
        ("save_weights", {"path": "../x"}, "is no name for a checkpoint"),
        ("save_weights_for_sampler", {"path": "x", "kind": "inflight"}, "kind=inflight"),
    ],
)
async def test_a_bad_number_leaves_no_hole(world: World, verb: str, body: Any, words: str) -> None:
    alice = world.alice
    model = await alice.model(await alice.session())
    failed = await alice.result(await alice.send(verb, model, 1, **body))
    assert words in failed["error"]
    step = await alice.send("optim_step", model, 2, adam_params={})
    assert (await alice.result(step))["metrics"] == {"seq": 2.0}


async def test_others_objects_are_not_there(world: World) -> None:
    session = await world.alice.session()
    model = await world.alice.model(session)
    saved = await world.alice.result(await world.alice.send("save_weights", model, 1, path="one"))
    bob = world.bob
    assert "no model" in (await bob.ask("get_info", {"model_id": model}, status=404))["detail"]
    await bob.ask("session_heartbeat", {"session_id": session}, status=404)
    await bob.ask("retrieve_future", {"request_id": f"{model}:1"}, status=404)
    await bob.ask("weights_info", {"tinker_path": saved["path"]}, status=404)
    assert (await bob.ask("training_runs", method="GET"))["training_runs"] == []
    await world.nobody.ask("training_runs", method="GET", status=401)


async def test_a_published_checkpoint_is_for_all(world: World) -> None:
    model = await world.alice.model(await world.alice.session())
    saved = await world.alice.result(await world.alice.send("save_weights", model, 1, path="one"))
    where = f"training_runs/{model}/checkpoints/weights/one"
    await world.bob.ask(f"{where}/publish", status=404)
    await world.alice.ask(f"{where}/publish", status=204)
    info = await world.bob.ask("weights_info", {"tinker_path": saved["path"]})
    assert info["lora_rank"] == 4
    await world.bob.ask(where, method="DELETE", status=404)
    body = {
        "session_id": await world.bob.session(),
        "model_seq_id": 0,
        "path": saved["path"],
        "optimizer": True,
    }
    made = await world.bob.ask("load_weights", body | {"optimizer": True})
    assert (await world.bob.result(made["request_id"]))["path"] == saved["path"]
    await world.alice.ask(where, method="DELETE", status=204)
    await world.alice.ask("weights_info", {"tinker_path": saved["path"]}, status=404)


async def test_a_checkpoint_ends_with_its_time(world: World) -> None:
    alice = world.alice
    model = await alice.model(await alice.session())
    for seq, ttl in ((1, 3600), (2, 1e-6)):
        await alice.result(await alice.send("save_weights", model, seq, path=f"n{seq}", ttl_seconds=ttl))
    listed = (await alice.ask("checkpoints", method="GET"))["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["weights/n1"] and listed[0]["expires_at"]
    await alice.ask(f"training_runs/{model}/checkpoints/weights/n1/ttl", {}, method="PUT", status=204)
    [one] = (await alice.ask("checkpoints", method="GET"))["checkpoints"]
    assert one["expires_at"] is None


async def test_a_run_that_cannot_be_made_fails(world: World) -> None:
    alice = world.alice
    world.daemon.refuses = SpecError("lora.rank: 4096 is too large", hint="Take 64.")
    body = {"session_id": await alice.session(), "model_seq_id": 0, "base_model": BASE}
    made = await alice.ask("create_model", body)
    assert await alice.result(made["request_id"]) == {
        "error": "lora.rank: 4096 is too large. Take 64.",
        "category": "user",
    }


async def test_an_unknown_base_names_those_there_are(world: World) -> None:
    body = {"session_id": await world.alice.session(), "model_seq_id": 0, "base_model": "x/y"}
    refused = await world.alice.ask("create_model", body, status=400)
    assert "There are: tiny/base" in refused["detail"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (f"{BASE}/resolve/main/config.json", 200, None),
        (f"{BASE}/resolve/main/model.safetensors", 404, "EntryNotFound"),
        ("x/y/resolve/main/config.json", 404, "RepoNotFound"),
        ("api/models/x/y", 404, "RepoNotFound"),
        ("api/models/x/y/tree/main", 404, "RepoNotFound"),
    ],
)
async def test_the_hub_says_what_is_missing(world: World, path: str, status: int, code: str | None) -> None:
    async with world.client.get(f"/{path}") as response:
        assert (response.status, response.headers.get("X-Error-Code")) == (status, code)


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


async def test_a_run_lists_its_last_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await world.alice.model(await world.alice.session())
    monkeypatch.setattr("lorad.tinker.door.lane.time.time", lambda: 4e9)
    await world.alice.send("optim_step", model, 1, adam_params={})
    run = await world.alice.ask(f"training_runs/{model}", method="GET")
    assert run["last_request_time"] == "2096-10-02T07:06:40Z"


async def test_a_checkpoint_of_no_base_is_refused(world: World) -> None:
    session = await world.alice.session()
    model = await world.alice.model(session)
    saved = await world.alice.result(await world.alice.send("save_weights", model, 1, path="one"))
    world.door.models.bases.clear()  # as config.yaml names it no more
    body = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    assert "is not served here" in (await world.alice.ask("load_weights", body, status=400))["detail"]


async def test_unsupported_routes_are_refused_in_words(world: World) -> None:
    refused = await world.alice.ask("copy_weights", {}, status=404)
    assert "lorad copies no checkpoints" in refused["detail"]
    assert "not supported by lorad" in (await world.alice.ask("nothing", {}, status=404))["detail"]
    assert await world.alice.ask("telemetry", {"events": []}) == {"status": "accepted"}


async def test_a_restarted_door_knows_all(tmp_path: Path) -> None:
    home = home_with_keys(tmp_path / "home")
    async with running_door(home) as world:
        session = await world.alice.session()
        model = await world.alice.model(session)
        world.lanes.held.clear()
        request = await world.alice.forward_backward(model, 1)
        daemon = world.daemon
    async with running_door(home, daemon) as world:
        assert await world.alice.forward_backward(model, 1) == request
        assert isinstance(await world.alice.result(request), bytes)
        assert (await world.alice.ask("sessions", method="GET"))["sessions"] == [session]
        await world.alice.send("optim_step", model, 2, adam_params={})
        [run] = world.lanes.done
        first = world.lanes.done[run][1].arguments
        assert isinstance(first, Pass) and first.lengths.tolist() == [3, 2]


async def test_a_silent_session_is_parked_and_resumed(tmp_path: Path) -> None:
    async with running_door(home_with_keys(tmp_path / "home"), park_after=60.0) as world:
        alice = world.alice
        session = await alice.session()
        model = await alice.model(session)
        await world.door.models.park_silent(60.0)
        assert list(world.daemon.runs.values()) == ["running"]
        world.door.state.heard_at[session] -= 61
        await world.door.models.park_silent(60.0)
        assert list(world.daemon.runs.values()) == ["paused"]
        await alice.result(await alice.send("optim_step", model, 1, adam_params={}))
        for _ in range(100):
            if "paused" not in world.daemon.runs.values():
                break
            await alice.ask("session_heartbeat", {"session_id": session})
        assert list(world.daemon.runs.values()) == ["running"]


async def test_a_pause_by_others_stays(world: World) -> None:
    alice = world.alice
    model = await alice.model(await alice.session())
    world.lanes.held.clear()
    [run] = world.daemon.runs
    world.daemon.runs[run] = "paused"
    request = await alice.send("optim_step", model, 1, adam_params={})
    reason = None
    while not reason:  # what the daemon said a moment ago holds
        held = await alice.ask("retrieve_future", {"request_id": request}, status=408)
        reason = held["queue_state_reason"]
    assert f"`lorad resume {run}` continues it" in reason
    assert world.daemon.runs[run] == "paused"


async def test_parking_is_tried_until_the_daemon_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_door(home_with_keys(tmp_path / "home")) as world:
        session = await world.alice.session()
        await world.alice.model(session)
        await world.alice.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)

        def away(_: str) -> None:
            raise DaemonUnreachable("no daemon answers")

        with monkeypatch.context() as patch:
            patch.setattr(world.daemon, "pause", away)
            await world.door.models.park_silent(300.0)
        assert list(world.daemon.runs.values()) == ["running"]
        await world.door.models.park_silent(300.0)
        assert list(world.daemon.runs.values()) == ["paused"]
        assert session not in world.door.state.heard_at


async def test_a_restarted_door_parks_finished_sessions(tmp_path: Path) -> None:
    home = home_with_keys(tmp_path / "home")
    async with running_door(home) as world:
        session = await world.alice.session()
        await world.alice.model(session)
        await world.alice.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
        daemon = world.daemon
    for expected in (["paused"], ["running"]):  # once: what somebody resumes then is theirs
        async with running_door(home, daemon) as world:
            await world.door.models.park_silent(300.0)
            assert list(daemon.runs.values()) == expected
        daemon.runs = dict.fromkeys(daemon.runs, "running")


async def test_a_pause_by_others_outlives_silence(tmp_path: Path) -> None:
    async with running_door(home_with_keys(tmp_path / "home")) as world:
        session = await world.alice.session()
        model = await world.alice.model(session)
        world.daemon.runs = dict.fromkeys(world.daemon.runs, "paused")
        world.door.models.runs._answers.clear()  # what the daemon said a moment ago
        world.door.state.heard_at[session] -= 301
        await world.door.models.park_silent(300.0)
        await world.alice.result(await world.alice.send("optim_step", model, 1, adam_params={}))
        assert not world.door.state.models[model].parked
        assert list(world.daemon.runs.values()) == ["paused"]


async def test_a_run_that_was_stopped_fails_its_requests(world: World) -> None:
    alice = world.alice
    model = await alice.model(await alice.session())
    world.lanes.held.clear()
    [run] = world.daemon.runs
    world.daemon.runs[run] = "ended stopped"
    request = await alice.send("optim_step", model, 1, adam_params={})
    failed = await alice.result(request)
    assert f"run {run} ended (stopped)" in failed["error"]
    world.lanes.held.set()
    world.daemon.runs[run] = "running"
    for _ in range(100):
        answer = await alice.result(request)
        if "metrics" in answer:
            break
    assert answer == {"metrics": {"seq": 1.0}}


async def a_request_for_samples(world: World) -> dict[str, Any]:
    body = {"session_id": await world.alice.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await world.alice.ask("create_sampling_session", body))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    return {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {}}


async def test_samples_that_are_not_known_are_asked_again(world: World) -> None:
    session = await world.alice.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await world.alice.ask("create_sampling_session", body))["sampling_session_id"]
    await world.alice.ask("retrieve_future", {"request_id": f"{sampler}:3"}, status=410)
    polled = await world.alice.ask("retrieve_futures", {"target": {"sampling_session_id": sampler}})
    assert polled == {"completions": [], "cursor": 0}


async def test_copies_of_a_sampler_count_apart(tmp_path: Path) -> None:
    home = home_with_keys(tmp_path / "home")
    async with running_door(home) as world:
        body = {"session_id": await world.alice.session(), "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = await world.alice.ask("create_sampling_session", body)
        asked = {"sampling_session_id": sampler["sampling_session_id"]}
        first = (await world.alice.ask("join_sampling_session", asked))["client_counter"]
    async with running_door(home) as world:
        second = (await world.alice.ask("join_sampling_session", asked))["client_counter"]
    assert (first, second) == (1, 2)


async def test_copies_made_at_once_count_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await world.alice.session()
    model = await world.alice.model(session)
    saved = await world.alice.send("save_weights_for_sampler", model, 1, sampling_session_seq_id=0)
    asked = {"sampling_session_id": (await world.alice.result(saved))["sampling_session_id"]}
    results, both, waits = world.door.models.results, asyncio.Barrier(2), iter((0.0, 0.2))

    async def together(model: Any) -> Any:
        await both.wait()
        await asyncio.sleep(next(waits))
        return await results(model)

    monkeypatch.setattr(world.door.models, "results", together)
    joined = await asyncio.gather(*(world.alice.ask("join_sampling_session", asked) for _ in range(2)))
    assert sorted(answer["client_counter"] for answer in joined) == [1, 2]


async def test_a_request_for_samples_begins_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, begun = await a_request_for_samples(world), []

    async def answer(name: str, wish: Any, waits: Any) -> bytes:
        begun.append(name)
        return b"samples"

    limits, both = world.door.limits, asyncio.Barrier(2)

    async def together(base: str) -> Any:
        await both.wait()
        return await limits(base)

    monkeypatch.setattr(world.door, "limits", together)
    monkeypatch.setattr(world.door.pools, "answer", answer)
    first, second = await asyncio.gather(*(world.alice.ask("asample", asked) for _ in range(2)))
    assert await world.alice.result(first["request_id"]) == b"samples"
    assert len(begun) == 1 and first == second


async def test_samples_that_nobody_fetches_are_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(name: str, wish: Any, waits: Any) -> bytes:
        return b"samples"

    monkeypatch.setattr(world.door.pools, "answer", answer)
    asked = await a_request_for_samples(world)
    sampler = {"target": {"sampling_session_id": asked["sampling_session_id"]}}
    for seq in (1, 2):
        made = await world.alice.ask("asample", asked | {"seq_id": seq})
        await world.alice.result(made["request_id"])
    assert len((await world.alice.ask("retrieve_futures", sampler))["completions"]) == 2
    monkeypatch.setattr(sampling, "_KEPT", -1.0)
    world.door.samples.forget_old()
    polled = await world.alice.ask("retrieve_futures", sampler)
    assert polled == {"completions": [], "cursor": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_samples": 0}, "num_samples 0"),
        ({"prompt": {"chunks": []}}, "prompt has no tokens"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "a chunk of image"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**7]}]}}, "the token 10000000"),
        ({"sampling_params": {"temperature": -1}}, "out of range"),
        ({"topk_sample_logprobs": 3}, "topk_sample_logprobs: not supported"),
        ({"prompt_logprobs_last_n": 3}, "needs prompt_logprobs"),
    ],
)
async def test_bad_requests_for_samples_are_refused(world: World, changes: Any, words: str) -> None:
    asked = await a_request_for_samples(world)
    assert words in (await world.alice.ask("asample", asked | changes, status=400))["detail"]


async def test_files_go_when_nobody_can_ask_for_them(world: World) -> None:
    alice = world.alice
    session = await alice.session()
    model = await alice.model(session)
    verb = "save_weights_for_sampler"
    await alice.result(await alice.send(verb, model, 1, sampling_session_seq_id=0))
    await alice.result(await alice.send(verb, model, 2, path="one"))
    await alice.result(await alice.send("save_weights", model, 3, path="one"))
    [run] = world.daemon.runs
    root = world.door.home.run(run).root

    async def left() -> list[str]:
        await world.door.cleaning.look()
        return sorted(
            str(path.relative_to(root)) for path in (*root.glob("versions/*"), *root.glob("*/weights/*"))
        )

    assert await left() == ["tinker/weights/one", "versions/000001", "versions/000002"]
    await alice.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
    assert await left() == ["tinker/weights/one", "versions/000002"]
    for kind in ("weights", "sampler_weights"):
        await alice.ask(f"training_runs/{model}/checkpoints/{kind}/one", method="DELETE", status=204)
    assert await left() == [] and world.door.state.sessions[session].cleaned


async def test_a_model_may_name_its_run(world: World) -> None:
    session = await world.alice.session()
    for number in range(2):
        await world.alice.model(session, number, user_metadata={"name": "sorter"})
    await world.alice.model(session, 2, user_metadata={"name": "../x"})
    await world.alice.model(session, 0, user_metadata={"name": "sorter"})  # the same once more
    assert [*world.daemon.runs] == ["sorter", f"tinker-{session}-1", f"tinker-{session}-2"]
