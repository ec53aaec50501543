"""A judge behind an OpenAI API: its scores, its failures, what is kept and what it costs."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lorad.driver.rewards import Rewarder, Score
from lorad.errors import SpecError
from lorad.rl.reward import RewardInput
from lorad.spec.reward import RewardSpec

KEY = "key-that-nobody-else-has"
Reply = Callable[[str, int], tuple[int, dict[str, str], Any]]


class Server(ThreadingHTTPServer):
    """Answers by `reply`, which gets the question and how often it was asked."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: Reply = lambda text, _: said(f"Score: {len(text.rpartition('=')[2])}")
        self.asked: list[str] = []
        self.keys: set[str | None] = set()
        self.under_way = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        server = self.server
        with server.lock:
            server.asked.append(text)
            server.keys.add(self.headers["Authorization"])
            number = server.asked.count(text)
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        status, headers, body = server.reply(text, number)
        with server.lock:
            server.under_way -= 1
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


def said(text: str | None) -> tuple[int, dict[str, str], Any]:
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    return 200, {}, {"choices": [{"message": {"content": text}}], "usage": usage}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def spec(server: Server, **settings: Any) -> RewardSpec:
    usual: dict[str, Any] = {
        "url": server.url,
        "model": "m",
        "prompt": "{prompt}={completion}",
        "timeout": 20.0,
        "retries": 0,
    }
    return RewardSpec(name="judge", **usual | settings)


def scored(server: Server, *completions: str, cwd: Path = Path(), **settings: Any) -> list[Score]:
    with Rewarder([spec(server, **settings)], cwd) as rewarder:
        return rewarder.score([RewardInput("q", text, "a", "stop") for text in completions])


def test_scores_become_zero_to_one(server: Server) -> None:
    assert [score.value for score in scored(server, "", "12345", "1234567890")] == [0, 0.5, 1]
    assert [s.value for s in scored(server, "123", range=(2, 4), pattern=r"Score: (\d)")] == [0.5]


def test_calls_are_under_way_together(server: Server) -> None:
    barrier = threading.Barrier(8, timeout=15)
    server.reply = lambda *_: (barrier.wait(), said("Score: 1"))[1]
    assert [s.value for s in scored(server, *map(str, range(8)), concurrency=8)] == [0.1] * 8
    assert server.most == 8
    server.reply, server.most = (lambda *_: said("Score: 1")), 0
    scored(server, *map(str, range(20)), concurrency=2)
    assert server.most <= 2


def test_template_is_filled_once(server: Server) -> None:
    scored(server, "{answer} {prompt}", prompt="<{prompt}|{completion}|{answer}> {other}")
    assert server.asked == ["<q|{answer} {prompt}|a> {other}"]


def test_answers_are_asked_for_where_named(server: Server) -> None:
    for prompt, missing in (("{completion}", {}), ("{completion} {answer}", {"judge": ["answer"]})):
        with Rewarder([spec(server, prompt=prompt)], Path()) as rewarder:
            assert rewarder.lacking({"prompt": "q"}, has_answers=False) == missing


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (said("no idea"), "no score in what the judge said: 'no idea'"),
        (said("Score: 11"), "11 is not from 0 to 10"),
        (said(None), "said nothing"),
        ((200, {}, b"<html>"), "no completion"),
        ((200, {}, []), "no completion"),
        ((401, {}, f"wrong key {KEY}".encode()), "answered 401: wrong key …"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "answered 302"),
    ],
)
def test_failed_call_is_a_failed_reward(server: Server, tmp_path: Path, reply: Any, says: str) -> None:
    server.reply = lambda *_: reply
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    score = scored(server, "x", cwd=tmp_path, key_file="key", cache="kept")[0]
    assert score.value is None and says in score.error and KEY not in score.error
    assert (score.costs["judge/calls"], server.keys) == (1, {f"Bearer {KEY}"})
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_tried_again(server: Server, status: int) -> None:
    server.reply = lambda text, number: (status, {}, b"later") if number < 3 else said("Score: 5")
    score = scored(server, "x")[0]
    assert score.value == 0.5
    assert score.costs == {
        "judge/calls": 3, "judge/failed_calls": 2, "judge/cached": 0,
        "judge/prompt_tokens": 10, "judge/completion_tokens": 2,
    }  # fmt: skip


def test_server_says_when_to_try_again(server: Server) -> None:
    times = list[float]()

    def reply(_: str, number: int) -> tuple[int, dict[str, str], Any]:
        times.append(time.monotonic())
        return (429, {"Retry-After": "2"}, b"") if number == 1 else said("Score: 5")

    server.reply = reply
    assert scored(server, "x")[0].value == 0.5
    assert times[1] - times[0] >= 2


def test_time_of_a_call_bounds_all_tries(server: Server) -> None:
    server.reply = lambda *_: (503, {}, b"never")
    started = time.monotonic()
    score = scored(server, "x", timeout=1.5)[0]
    assert score.value is None and "within 1.5 s" in score.error
    assert score.costs["judge/calls"] >= 1 and time.monotonic() - started < 15


def test_missing_server_is_named(server: Server) -> None:
    score = scored(server, "x", url="http://127.0.0.1:1/v1", timeout=1.0)[0]
    assert score.value is None
    assert score.error == (
        "no score within 1 s: the judge at http://127.0.0.1:1/v1 cannot be reached: Connection refused "
        "(start its server, or correct reward.url)"
    )


def test_silent_server_is_named(server: Server) -> None:
    def late(*_: object) -> Any:
        time.sleep(2)
        return said("Score: 1")

    server.reply = late
    score = scored(server, "x", timeout=0.5)[0]
    assert score.error == f"no score within 0.5 s from the judge at {server.url}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_judge_of_this_machine_needs_no_proxy(
    server: Server, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "corp.example")
    score = scored(server, "12", url=server.url.replace("127.0.0.1", host))[0]
    assert (score.value, score.error) == (0.2, "")


def test_equal_questions_are_asked_once(server: Server, tmp_path: Path) -> None:
    made = scored(server, *["x"] * 6, "y", cwd=tmp_path, cache="kept", price=(1e6, 2e6))
    assert sorted(server.asked) == ["q=x", "q=y"]
    assert sum(s.costs["judge/cached"] for s in made) == 5
    assert sum(s.costs["judge/price"] for s in made) == 2 * (10 + 4)
    again = scored(server, "x", "y", cwd=tmp_path, cache="kept")
    assert [s.value for s in again] == [made[0].value, made[-1].value] and len(server.asked) == 2
    scored(server, "x", cwd=tmp_path, cache="kept", model="other")
    assert len(server.asked) == 3


@pytest.mark.system
def test_damaged_cache_is_asked_anew(server: Server, tmp_path: Path) -> None:
    scored(server, "x", cwd=tmp_path, cache="kept")
    (kept,) = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    whole = kept.read_bytes()
    for wrong in (b"", whole[:-9], whole.replace(b"Score: 1", b"Score: 9"), b"[]", b"\xff"):
        kept.write_bytes(wrong)
        assert scored(server, "x", cwd=tmp_path, cache="kept")[0].value == 0.1
        assert kept.read_bytes() == whole


WRITER = """
import sys
from pathlib import Path
from lorad.driver.user.judge_reward import _Cache
cache, number = _Cache(Path(sys.argv[1])), 0
print(flush=True)
while True:
    cache.put("aa%d" % (number % 7), "x" * 200_000 + str(number)); number += 1
"""


@pytest.mark.system
def test_killed_writers_leave_whole_texts(tmp_path: Path) -> None:
    from lorad.driver.user.judge_reward import _Cache

    for round in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.01 * round)
            writer.kill()
        there = [path.name for path in tmp_path.glob("aa/aa*")]
        texts = [_Cache(tmp_path).get(name) for name in there]
        assert all(text is not None and re.fullmatch(r"x{200000}\d+", text) for text in texts)


def test_retried_samples_count_what_they_cost(server: Server) -> None:
    server.reply = lambda text, number: said("nothing") if number == 1 else said("Score: 5")
    score = scored(server, "x", retries=1)[0]
    assert (score.value, score.costs["judge/calls"], score.costs["judge/prompt_tokens"]) == (0.5, 2, 20)


def test_key_file_of_others_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o644)
    for name in ("key", "none"):
        with pytest.raises(SpecError) as refused:
            Rewarder([spec(server, key_file=name)], tmp_path)
        assert refused.value.key == "reward.key_file" and refused.value.hint
        assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "judge", "model": "m"}, "url is missing"),
        ({"name": "judge", "url": "http://h/v1"}, "model is missing"),
        ({"url": "http://h/v1"}, "url is for judge"),
        ({"name": "judge", "url": "http://h/v1", "model": "m", "range": (1, 1)}, "lowest"),
        ({"name": "judge", "url": "http://h/v1", "model": "m", "prompt": "good?"}, "no {completion}"),
        ({"name": "judge", "url": "http://h/v1", "model": "m", "sandbox": "bubblewrap"}, "no network"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RewardSpec(**settings)


@pytest.mark.parametrize("pattern", ["(", "none", "(two) (groups)"])
def test_patterns_without_a_score_are_refused(server: Server, pattern: str) -> None:
    with pytest.raises(SpecError, match=r"reward\.pattern"):
        Rewarder([spec(server, pattern=pattern)], Path())
