"""Environments of verifiers, on stand-ins of its two interfaces: rows, episodes, and what is refused."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

import pytest
from msgspec import to_builtins

from lorad.envs.programs import Play, Played, Programs
from lorad.errors import SpecError
from lorad.rl.generated.environment import described, environment_rows
from lorad.rl.sources import Row
from lorad.spec.env import EnvSpec

FAKES = Path(__file__).parent / "fake_verifiers"
CLASSIC, TASKSET = "verifiers:owner/classic-toy@0.1.0", "verifiers:taskset-toy"
TOO_LONG = "This model's maximum context length is 64 tokens (env.max_tokens): no room"


class Door(BaseHTTPRequestHandler):
    """Says what its address says; `-` is nothing, and `overlong` and `refused` are errors."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append({key: value for key, value in body.items() if key != "messages"})
        said = unquote(self.path.split("/")[1])
        errors = {"overlong": (TOO_LONG, "context_length_exceeded"), "refused": ("no", "invalid")}
        if said in errors:
            message, code = errors[said]
            self.send(400, {"error": {"message": message, "code": code}})
            return
        self.send(200, {"choices": [{"message": {"role": "assistant", "content": said.strip("-")}}]})

    def send(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def door() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        Door.bodies.clear()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def fakes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a test find the stand-in that its name asks for, `new` or the old one, and something called uv."""
    kind = "new" if "new" in request.node.name.split("_") else "old"
    monkeypatch.setenv("PYTHONPATH", str(FAKES / kind))
    (tmp_path / "uv").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.fixture
def play(door: str, tmp_path: Path) -> Iterator[Callable[..., list[Played]]]:
    """Plays a row once for each text that the model says, all at once in one process."""
    opened = list[Programs]()

    def played(name: str, *texts: str, row: int = 0, **settings: Any) -> list[Played]:
        env = {"workers": 1, "concurrency": 64, "episode_timeout": 60.0, **settings}
        spec = EnvSpec(name=name, **env)
        task = to_builtins(described(spec, tmp_path).rows[row])
        opened.append(Programs(spec, tmp_path))
        sampling = {"model": "m@1", "temperature": 1.0, "top_p": 0.9, "max_tokens": 16}
        plays = [Play(f"{door}/{quote(text)}/v1", task, sampling) for text in texts]
        with ThreadPoolExecutor(len(plays)) as threads:
            return [*threads.map(opened[-1].play, plays)]

    yield played
    for programs in opened:
        programs.close()


def refusal_of(name: str, cwd: Path, **settings: Any) -> SpecError:
    with pytest.raises(SpecError) as refused:
        described(EnvSpec(name=name, **settings), cwd)
    return refused.value


@pytest.mark.system
def test_rewards_of_old_environments_are_kept(play: Callable[..., list[Played]]) -> None:
    right, wrong = play(CLASSIC, "single", "other")
    assert (right.reward, wrong.reward) == (1.0, 0.0) and not right.error
    assert right.metrics == {"right": 1.0, "num_turns": 1.0, "of_two_words": 1.0}
    asked = {"model": "m@1", "temperature": 1.0, "top_p": 0.9, "max_completion_tokens": 16}
    assert Door.bodies == [asked, asked]


@pytest.mark.system
def test_rewards_of_new_environments_are_kept(play: Callable[..., list[Played]]) -> None:
    right, wrong = play(TASKSET, "right", "other")
    assert (right.reward, wrong.reward) == (1.0, 0.0) and not right.error
    assert right.metrics == {"reward/right": 1.0, "letters": 5.0}


@pytest.mark.system
def test_faults_of_old_environments_have_reasons(play: Callable[..., list[Played]]) -> None:
    silent, overlong, refused = play(CLASSIC, "-", "overlong", "refused")
    assert (silent.reward, silent.error, silent.metrics["num_turns"]) == (0.0, "", 0.0)
    assert (overlong.reward, overlong.error) == (0.0, "")
    assert refused.reward is None and '"no"' in refused.error


@pytest.mark.system
def test_faults_of_new_environments_have_reasons(play: Callable[..., list[Played]]) -> None:
    (refused,) = play(TASKSET, "refused")
    assert refused.reward is None and refused.error.startswith("ProviderError: ")


@pytest.mark.system
@pytest.mark.parametrize(
    ("own", "turns", "is_limited"),
    [pytest.param(-1, 2, True, marks=pytest.mark.long), (3, 2, True), (2, 3, False)],
)
def test_turns_are_the_environments_own_limit(
    play: Callable[..., list[Played]], own: int, turns: int, is_limited: bool
) -> None:
    (played,) = play(CLASSIC, "text", args={"kind": "talk", "max_turns": own}, turns=turns)
    assert (played.metrics["num_turns"], played.is_limited) == (2.0, is_limited)


@pytest.mark.system
@pytest.mark.parametrize(
    ("own", "turns", "is_limited"),
    [pytest.param(None, 1, True, marks=pytest.mark.long), (2, 1, True), (1, 2, False)],
)
def test_turns_of_new_environments_are_limited(
    play: Callable[..., list[Played]], own: int | None, turns: int, is_limited: bool
) -> None:
    (played,) = play(TASKSET, "text", args={"agent": {"max_turns": own}}, turns=turns)
    assert (played.error, played.is_limited) == ("", is_limited)


@pytest.mark.system
def test_new_environments_may_begin_the_chat(play: Callable[..., list[Played]]) -> None:
    (played,) = play(TASKSET, "right", args={"taskset": {"silent": True, "opens": True}})
    assert (played.reward, played.error) == (1.0, "")


@pytest.mark.system
def test_a_new_environment_that_cannot_serve_says_why(play: Callable[..., list[Played]]) -> None:
    (played,) = play(TASKSET, "text", args={"taskset": {"unready": True}})
    assert "RuntimeError: its server did not start" in played.error


@pytest.mark.system
def test_clients_are_closed_after_an_episode(play: Callable[..., list[Played]]) -> None:
    played = play(CLASSIC, *["text"] * 3, args={"kind": "alone", "max_turns": 1}, concurrency=1)
    assert [each.error for each in played] == [""] * 3


@pytest.mark.system
def test_one_process_plays_many_at_once(play: Callable[..., list[Played]]) -> None:
    played = play(CLASSIC, *["text"] * 32, args={"kind": "meet", "max_turns": 1})
    assert {(each.reward, each.error) for each in played} == {(0.0, "")}


@pytest.mark.system(but="die-SIGKILL")
@pytest.mark.parametrize(
    ("kind", "error"), [("hang", "it took 1 s"), ("die", "SIGKILL"), ("raise", "a fault of the")]
)
def test_faults_concern_their_own_episode(play: Callable[..., list[Played]], kind: str, error: str) -> None:
    (played,) = play(CLASSIC, "text", args={"kind": kind}, episode_timeout=1.0)
    assert played.reward is None and error in played.error


@pytest.mark.system
def test_rows_by_chance_are_noticed(play: Callable[..., list[Played]]) -> None:
    (played,) = play(CLASSIC, "text", args={"kind": "shuffles", "count": 4000})
    assert "row 0 has another prompt" in played.error


def split_rows(tmp_path: Path, name: str, **args: Any) -> tuple[list[Row], list[Row]]:
    """Return the rows that are trained on, and those that are held out; no prompt is in both."""
    spec = EnvSpec(name=name, args=args)
    trained, held_out = ([*environment_rows(spec, split, tmp_path)] for split in ("train", "test"))
    prompts = [{json.dumps(row.values["prompt"]) for row in rows} for rows in (trained, held_out)]
    assert all(prompts) and prompts[0].isdisjoint(prompts[1])
    return trained, held_out


def test_one_prompt_in_16_is_held_out(tmp_path: Path) -> None:
    trained, held_out = split_rows(tmp_path, CLASSIC, count=400)
    assert {row.values["index"] for row in trained + held_out} == {*range(400)}
    assert 10 < len(held_out) < 40
    places = [row.values["index"] for row in held_out]
    assert min(places[:6]) < 200 < max(places[:6])  # the rows are in order, and an eval takes the first ones
    assert trained[0].values["prompt"] == [{"role": "user", "content": "S:0="}]


def test_of_new_tasksets_rows_are_held_out(tmp_path: Path) -> None:
    trained, held_out = split_rows(tmp_path, TASKSET)
    assert len(trained) + len(held_out) == 40 and len(held_out) < 9
    assert trained[0].values["prompt"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(("evals", "held"), [(3, {(0, True), (1, True), (2, True)}), (40, set())])
def test_what_is_evaluated_is_not_trained(evals: int, held: set[tuple[int, bool]], tmp_path: Path) -> None:
    trained, held_out = split_rows(tmp_path, CLASSIC, evals=evals)
    assert len(trained) == 37 if held else 30 < len(trained) < 40
    assert held == {(row.values["index"], True) for row in held_out if row.values["is_held_out"]}


@pytest.mark.system
@pytest.mark.parametrize("kind", ["game of words", pytest.param("game of chance", marks=pytest.mark.long)])
def test_rows_of_one_prompt_are_held_out(kind: str, tmp_path: Path) -> None:
    spec = EnvSpec(name=CLASSIC, args={"kind": kind, "count": 400})
    trained, held_out = ([*environment_rows(spec, split, tmp_path)] for split in ("train", "test"))
    assert {row.values["index"] for row in trained + held_out} == {*range(400)}
    assert 10 < len(held_out) < 40 and len(trained) + len(held_out) == 400


def test_one_row_of_few_is_held_out(tmp_path: Path) -> None:
    trained, held_out = split_rows(tmp_path, CLASSIC, count=2)
    assert len(trained) == len(held_out) == 1


@pytest.mark.system
def test_held_out_rows_are_played(play: Callable[..., list[Played]]) -> None:
    (played,) = play(CLASSIC, "of evals", args={"evals": 1, "eval_kind": "of evals"}, row=-1)
    assert (played.reward, played.error) == (1.0, "")


@pytest.mark.system
def test_an_endless_new_taskset_is_cut(tmp_path: Path) -> None:
    spec = EnvSpec(name=TASKSET, args={"taskset": {"endless": True}})
    assert len(described(spec, tmp_path).rows) == 4096


def test_a_row_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has 1 rows"):
        [*environment_rows(EnvSpec(name=CLASSIC, args={"count": 1}), "train", tmp_path)]


REFUSED_OLD = [
    (CLASSIC, {"requires_group_rollouts": True}, "rewards of a whole group", "another environment"),
    (CLASSIC, {"message_type": "completion"}, "completions of plain text", "another environment"),
    (CLASSIC, {"kind": "sandbox"}, "has no PRIME_API_KEY", "env.pass_env"),
    (CLASSIC, {"kind": "evaluates"}, "no dataset to train on", "env.args"),
    ("verifiers:no-such", {}, "has no module no_such", "`prime env install no-such`"),
    ("verifiers:email", {}, "neither load_environment nor a taskset", "vf-eval"),
]


@pytest.mark.parametrize(("name", "args", "problem", "remedy"), REFUSED_OLD)
def test_what_cannot_be_played_is_refused(
    name: str, args: dict[str, Any], problem: str, remedy: str, tmp_path: Path
) -> None:
    refused = refusal_of(name, tmp_path, args=args)
    assert problem in refused.message and refused.key == "env.name" and remedy in refused.hint


REFUSED_NEW = [
    (TASKSET, {"agent": {"runtime": {"type": "modal"}}}, "runs in the cloud (modal)", "docker"),
    (TASKSET, {"agent": {"harness": {"id": "bash"}}}, "executes what the model writes", "docker"),
    (TASKSET, {"agent": {"harness": {"id": "codex"}}}, "and would do so as you", "docker"),
    (TASKSET, {"taskset": {"boxed": True}}, "needs a container", "docker"),
    (TASKSET, {"taskset": {"silent": True}}, "tasks without a prompt, and nobody", "another environment"),
    (TASKSET, {"rows": 3}, "env.args: unknown keys: rows", "block `env`"),
    ("verifiers:two-seats", {}, "2 agents that would be trained", "all but one a client"),
    ("verifiers:classic-toy", {}, "written for verifiers 0.1 to 0.3", "pip install 'verifiers<0.4'"),
]


@pytest.mark.parametrize(("name", "args", "problem", "remedy"), REFUSED_NEW)
def test_what_new_environments_cannot_is_refused(
    name: str,
    args: dict[str, Any],
    problem: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [FAKES / "new", FAKES / "old"] if name == "verifiers:classic-toy" else [FAKES / "new"]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, both)))
    refused = refusal_of(name, tmp_path, args=args)
    assert problem in refused.message and refused.key == "env.name" and remedy in refused.hint


def test_an_interpreter_without_verifiers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    refused = refusal_of(CLASSIC, tmp_path)
    assert "No module named 'verifiers'" in refused.message and "env.python" in refused.hint


def test_arguments_of_old_environments_are_known(tmp_path: Path) -> None:
    refused = refusal_of("verifiers:plain-toy", tmp_path, args={"sort": 1})
    assert "unexpected keyword argument 'sort' (env.args)" in refused.message
    assert refused.hint == "It takes: count."


def test_a_new_harness_without_uv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "uv").unlink()
    refused = refusal_of(TASKSET, tmp_path)
    assert "a script that `uv` runs" in refused.message and "pip install uv" in refused.hint
