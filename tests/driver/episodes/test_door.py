"""The door for agent programs: what they say by HTTP is what is trained."""

import contextlib
import gc
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.daemon.record.audit import audit
from lorad.driver.door.door import Door
from lorad.driver.sample import make, plan
from lorad.errors import LoradError
from tests.driver.driven import Driven
from tests.kit.pool_kit import TINY, Running, running_pool, swapped

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
AGENT = '''
import asyncio, json, os, time, urllib.error, urllib.request

def post(url, **body):
    request = urllib.request.Request(
        url + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    return text if body.get("stream") else json.loads(text)

async def run(base_url, task, sampling, bonus=0.0):
    """Two turns; how the second one goes on, the row says."""
    messages = [{"role": "user", "content": "S:391="}]
    say = lambda **more: asyncio.to_thread(post, base_url, **{"messages": messages, **sampling, **more})
    first = await say()
    said = first["choices"][0]["message"]
    assert first["model"] == sampling["model"]
    more = {"role": "user", "content": "S:82="}
    match task["kind"]:
        case "grows":
            parts = [{"type": "text", "text": "S:82="}]
            messages += [{**said, "extra": None}, {"role": "user", "content": parts}]
        case "forgets":
            messages[:] = [more]
        case "branches":
            messages += [said, more]
            await say()
        case "streams":
            messages += [said, more]
            events = (await say(stream=True, stream_options={"include_usage": True})).split("\\n\\n")
            assert events[-2] == "data: [DONE]" and json.loads(events[2][6:])["usage"]["completion_tokens"]
            return 0.5 + bonus
        case "asks":
            for key, value in ("temperature", 0.3), ("n", 2), ("messages", []):
                try:
                    await say(**{key: value})
                except urllib.error.HTTPError as error:
                    assert error.code == 400 and json.load(error)["error"]["param"] == key
            return 0.25 + bonus
        case "raises":
            raise KeyError("no such tool")
        case "hangs":
            time.sleep(60)
        case "grows long":
            with urllib.request.urlopen(base_url + "/models") as answer:
                limit = json.load(answer)["data"][0]["max_model_len"]
            try:
                await say(messages=[{"role": "user", "content": "S:391=" * limit}])
            except urllib.error.HTTPError as error:
                said = json.load(error)["error"]
                assert said["code"] == "context_length_exceeded"
                assert said["message"].startswith(f"This model's maximum context length is {limit} tokens")
            return 0.5 + bonus, {"limit": limit}
        case "talks":
            try:
                for _ in range(9):
                    await say()
            except urllib.error.HTTPError as error:
                assert json.load(error)["error"]["code"] == "turns_exceeded"
            return 0.125 + bonus
    second = await say(max_tokens=5)
    assert second["usage"]["completion_tokens"] <= 5
    text = second["choices"][0]["message"]["content"]
    return (text == "28") + len(text) / 100 + bonus
'''
KINDS = ("grows", "forgets", "branches", "streams", "asks", "raises", "hangs", "talks", "grows long")
HOW = (
    *("data.train=rows.jsonl", "data.prompts_per_step=9", "algorithm.group_size=2", "eval.every=0"),
    "env={name: 'agent.py:run', workers: 4, episode_timeout: 12, retry: 0, turns: 4, args: {bonus: 0.001}}",
    *("trainer.steps=1", "deterministic=false", "reward.max_failures=0.5", "rollout.max_new_tokens=8"),
)
Played = tuple[Driven, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("door")
    model = shutil.copytree(TINY, home / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (home / "agent.py").write_text(AGENT)
    rows = [msgspec.json.encode({"prompt": kind, "answer": "-", "kind": kind}) for kind in KINDS]
    (home / "rows.jsonl").write_bytes(b"\n".join(rows))
    with running_pool(home, deterministic=False, model=str(model), model_path=str(model)) as pool:
        yield pool


@pytest.fixture(scope="module")
def played(running: Running) -> tuple[Driven, dict[str, list[dict[str, Any]]]]:
    """One step; its samples by kind."""
    home = Path(running.config.socket).parent
    run = Driven(running, home, "agents", f"model.path={home / 'model'}", *HOW)
    end = run.drive()
    assert end.reason == "completed", end
    text = (run.run.root / run.facts("step")[0].data["samples"]).read_text()
    lines = [msgspec.json.decode(line) for line in text.splitlines()]
    return run, {kind: [line for line in lines if line["task"]["row"]["kind"] == kind] for kind in KINDS}


def test_chats_that_grow_stay_one_row(played: Played) -> None:
    run, kinds = played
    for line in kinds["grows"]:
        is_cut = line["turns"][0]["finish"] == "length"
        assert line.get("rows", 1) == 1 + is_cut and line["prompt"] == "S:391="
        assert len(line["logprobs"]) == sum(turn["tokens"] for turn in line["turns"])
    assert any(line.get("rows", 1) == 1 and line["turns"][0]["observed"] == 5 for line in kinds["grows"])
    assert audit(run.run.root) == []


def test_rewritten_chats_begin_rows(played: Played) -> None:
    _, kinds = played
    assert [line["rows"] for line in kinds["forgets"]] == [2, 2]
    assert all(line["forks"][0]["prompt"] for line in kinds["forgets"])
    for line in kinds["branches"]:
        assert len(line["turns"]) == 3 and line["rows"] == (2 if line["turns"][0]["finish"] == "stop" else 3)


def test_engine_and_trainer_agree_on_programs(played: Played) -> None:
    run, kinds = played
    metrics = run.facts("step")[0].data["metrics"]
    assert metrics["logprob_difference"] == pytest.approx(0, abs=1e-3)
    assert {line["version"] for some in kinds.values() for line in some} == {"agents@0"}
    assert {line["reward"] for line in kinds["streams"]} == {0.501}


def test_requests_that_change_the_sampling_are_refused(played: Played) -> None:
    _, kinds = played
    assert [(line["reward"], line["error"]) for line in kinds["asks"]] == [(0.251, "")] * 2
    assert [(line["reward"], line["end"]) for line in kinds["talks"]] == [(0.126, "turns")] * 2


def test_a_context_without_room_says_its_limit(played: Played) -> None:
    run, kinds = played
    assert [(line["reward"], line["end"]) for line in kinds["grows long"]] == [(0.501, "tokens")] * 2
    assert run.facts("step")[0].data["metrics"]["env/limit"] > 0


@pytest.mark.parametrize(
    ("kind", "says"),
    [("raises", "KeyError: 'no such tool'"), ("hangs", "it took 12 s (env.episode_timeout)")],
)
def test_programs_without_an_end_have_no_reward(played: Played, kind: str, says: str) -> None:
    _, kinds = played
    assert all(line["reward"] is None and line["end"] == "failed" for line in kinds[kind])
    assert all(says in line["error"] for line in kinds[kind])


def alone(running: Running, name: str, kind: str, *more: str) -> Driven:
    """A run whose rows are all of one kind."""
    home = Path(running.config.socket).parent
    row = msgspec.json.encode({"prompt": "-", "answer": "-", "kind": kind})
    (home / f"{name}.jsonl").write_bytes(row)
    how = (f"data.train={name}.jsonl", "data.prompts_per_step=1", *more)
    return Driven(running, home, name, f"model.path={home / 'model'}", *HOW, *how)


def test_a_failing_program_is_named(running: Running) -> None:
    end = alone(running, "failing", "raises", "reward.max_failures=0").drive()
    assert end.reason == "failed" and "Mend agent.py:run or allow more failures" in end.hint


@pytest.mark.system
def test_turns_behind_a_cut_are_warned_of(running: Running) -> None:
    run = alone(running, "cut", "forgets", "rollout.max_new_tokens=2", "trainer.steps=2")
    assert run.drive().reason == "completed"
    (warning,) = [fact.data["message"] for fact in run.facts("warning") if "had cut" in fact.data["message"]]
    assert warning.startswith(
        "2 of 2 episodes of step 1 went on behind a turn that rollout.max_new_tokens (2)"
    )
    assert "2.0 rows an episode" in warning


@pytest.mark.system
def test_a_version_in_mid_program_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(running.config.socket).parent
    row = msgspec.json.encode({"prompt": "-", "answer": "-", "kind": "branches"})
    (home / "branches.jsonl").write_bytes(row)
    how = ("data.train=branches.jsonl", "data.prompts_per_step=1", "env.workers=1")
    run = Driven(running, home, "mid", f"model.path={home / 'model'}", *HOW, *how)
    says = "tokens of swapped@7 came for mid@0"
    with run.begun() as session, swapped(monkeypatch) as turns, pytest.raises(LoradError, match=says):
        make(session, session.pool, plan(session, 0, 0, 0, 0, {}))
    assert turns[:2] == [0, 1]  # the other sample's program may have begun


@pytest.mark.system
def test_programs_are_played_ahead_and_resumed(running: Running) -> None:
    home = Path(running.config.socket).parent
    rows = [msgspec.json.encode({"prompt": "-", "answer": "-", "kind": "forgets"})] * 4
    (home / "forgets.jsonl").write_bytes(b"\n".join(rows))
    how = (
        *("data.train=forgets.jsonl", "data.prompts_per_step=2", "rollout.max_staleness=1"),
        *("checkpoint.every=1", "trainer.steps=2"),
    )
    python = f"env.python={sys.executable}"
    run = Driven(running, home, "ahead", f"model.path={home / 'model'}", *HOW, *how, python)
    assert run.drive().reason == "completed"
    assert run.drive(steps=4).reason == "completed"
    assert [r.data["metrics"]["staleness"] for r in run.facts("step")] == [0, 1, 1, 1]
    assert audit(run.run.root) == []


def test_a_door_that_cannot_open_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise OSError("too many open files")

    monkeypatch.setattr("asyncio.events.new_event_loop", fail)
    with ThreadPoolExecutor(1) as threads, pytest.raises(OSError, match="too many open files"):
        Door(threads)


@pytest.mark.system
def test_clients_at_the_last_moment_leave_nothing_open() -> None:
    with ThreadPoolExecutor(1) as threads:
        for _ in range(10):
            door, is_over = Door(threads), threading.Event()
            came: list[socket.socket] = []

            def come(port: int = door._port, came: Any = came, is_over: Any = is_over) -> None:
                while not is_over.wait(0.0005):
                    with contextlib.suppress(OSError):
                        came.append(socket.create_connection(("127.0.0.1", port), timeout=1))

            client = threading.Thread(target=come)
            client.start()
            while len(came) < 3:
                time.sleep(0.001)
            door.close()
            is_over.set()
            client.join()
            for one in came:
                one.close()
            del door
            gc.collect()  # what was left open is an error
