"""The gateway of a shared daemon: a front that is root's and opens nothing of users, and a process of each
owner's.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from lorad.box.paths import Home
from lorad.client.transport import Transport
from lorad.daemon.process.processes import attempts_under, read_status
from lorad.protocol.listener import answers
from lorad.protocol.traffic import FILE
from lorad.records.requests import ShutdownRequest
from tests.daemon.test_system_mode import ALICE, BOB, Box, as_user, status_of
from tests.kit.passable import why_not
from tests.kit.pool_kit import TINY
from tests.kit.warm.processes import CLIENT as WARM
from tests.kit.world import COLD

pytestmark = pytest.mark.system

ENDLESS = (
    "{% if messages[0]['content'] == 'loop' %}{% set big = range(99999) %}"
    "{% for a in big %}{% for b in big %}{% for c in big %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
)
HUNG = """
import asyncio, time
from lorad.gateway.own import watchdog
async def hang():
    async with watchdog.watched():
        await asyncio.sleep(0.2)
        time.sleep(30)
watchdog._HUNG_SECONDS, watchdog._ROUND_SECONDS = 0.5, 0.05
asyncio.run(hang())
"""


@pytest.fixture(scope="module", autouse=True)
def users() -> None:
    if reason := why_not():
        pytest.skip(reason)


class Served(Box):
    """A run of Alice's, whose model nobody else can read, and one of Bob's; `of-alice` and `of-bob` mean
    versions.
    """

    def prepare(self) -> None:
        model = self.homes[ALICE] / "model"
        shutil.copytree(TINY, model)
        template = model / "chat_template.jinja"
        template.write_text(ENDLESS + template.read_text())
        for path in (model, *model.iterdir()):
            path.chmod(0o700 if path.is_dir() else 0o600)
            os.chown(path, ALICE, ALICE)
        for uid, name, *more in ((ALICE, "a", f"model.path={model}"), (BOB, "b")):
            self.run(uid, name, "trainer.steps=2", *more)
            assert self.over(name)["reason"] == "completed", self.ask(uid, "GET", f"runs/{name}/logs")
        for uid, name in ((ALICE, "a"), (BOB, "b")):
            alias = {ALICE: "of-alice", BOB: "of-bob"}[uid]
            self.ask(uid, "POST", f"aliases/{alias}", {"version": f"{name}@2"})
        until(lambda: self.front and self.says("of-alice") and self.says("of-bob"))
        self.replace(COLD, *self.gateways)  # a fork has open what the warm process has
        until(lambda: self.front and self.says("of-alice") and self.says("of-bob"))

    @property
    def world(self) -> Home:
        return Home(self.home)

    @property
    def front(self) -> int:
        return pid_of(self.world.gateway)

    @property
    def gateways(self) -> tuple[int, ...]:
        return self.front, self.gateway_of(ALICE), self.gateway_of(BOB)

    def gateway_of(self, uid: int) -> int:
        return pid_of(self.world.gateway_of(uid))

    @contextlib.contextmanager
    def http(self, socket: Path | None = None) -> Iterator[httpx2.Client]:
        transport = httpx2.HTTPTransport(uds=str(socket or self.world.gateway_socket))
        with httpx2.Client(transport=transport, base_url="http://lorad/v1", timeout=60) as client:
            yield client

    def post(self, model: str, *, socket: Path | None = None, **body: Any) -> httpx2.Response:
        asked = {"model": model, "temperature": 0, "max_tokens": 8} | body
        path = "chat/completions" if "messages" in body else "completions"
        with self.http(socket) as client:
            return client.post(path, json=asked if "messages" in body else {"prompt": "7 3 1"} | asked)

    def says(self, model: str) -> bool:
        return answers(self.world.gateway_socket) and self.post(model).status_code == 200


def until(true: Callable[[], Any], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pid_of(root: Path) -> int:
    """Return the pid of the newest life under `root`; 0 while there is none."""
    lives = list(attempts_under(root))
    status = (read_status(lives[-1]) if lives else None) or {}
    return 0 if status.get("ended_at") else status.get("pid") or 0


@pytest.fixture(scope="module")
def box() -> Iterator[Served]:
    root = Path(tempfile.mkdtemp(prefix="lr-"))
    root.chmod(0o711)
    (root / "lorad").mkdir()
    (root / "lorad" / "config.yaml").write_text("devices: {cpu_slots: 2}\n")
    made = Served(root)
    try:
        made.prepare()
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)


def open_files(pid: int) -> set[str]:
    """List the files that a process has open or mapped."""
    links = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    return links | {line.split(maxsplit=5)[5].strip() for line in open_maps(pid) if line.count("/")}


def open_maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def test_owners_gateway_runs_unprivileged_as_its_owner(box: Served) -> None:
    for uid in (ALICE, BOB):
        status = status_of(box.gateway_of(uid))
        assert status["Uid"].split() == [str(uid)] * 4
        assert (status["NoNewPrivs"], int(status["CapEff"], 16), int(status["CapPrm"], 16)) == ("1", 0, 0)
    assert status_of(box.front)["Uid"].split() == ["0"] * 4


def test_front_opens_no_model_and_no_tokenizer(box: Served) -> None:
    assert box.says("of-alice")
    front, owners = open_files(box.front), open_files(box.gateway_of(ALICE))
    assert any("tokenizers" in name for name in owners)
    assert not [
        name for name in front if "tokenizers" in name or str(box.homes[ALICE]) in name or "/runs/" in name
    ]


def test_table_of_an_owner_is_private(box: Served) -> None:
    table = box.world.gateway_of(ALICE) / "table.json"
    told = json.loads(table.read_bytes())
    assert (told["aliases"], set(told["versions"])) == ({"of-alice": "a@2"}, {"a@2"})
    assert (table.stat().st_uid, table.stat().st_mode & 0o777, table.parent.stat().st_uid) == (
        ALICE,
        0o400,
        0,
    )
    assert "denied" in as_user(BOB, "cat", str(table)).stderr
    assert "denied" in as_user(ALICE, "mv", str(table), str(box.homes[ALICE])).stderr
    assert "denied" in as_user(BOB, "ls", str(box.world.gateway_socket_of(ALICE))).stderr
    with box.http() as client:
        names = [model["id"] for model in client.get("models").json()["data"]]
    assert names == ["of-alice", "of-bob", "a@2", "b@2"]


def test_front_answers_as_the_owners_gateway(box: Served) -> None:
    direct = box.world.gateway_socket_of(ALICE)
    for more in (
        {"stream": True},
        {"n": 2, "logprobs": 1, "seed": 3, "temperature": 1},
        {"max_tokens": 99999},
    ):
        one, other = (box.post("of-alice", socket=socket, **more) for socket in (None, direct))
        assert one.status_code == other.status_code
        for header in (
            "content-type",
            "x-lorad-version",
            "cache-control",
            "transfer-encoding",
            "content-length",
        ):
            assert one.headers.get(header) == other.headers.get(header)
        assert neutral(one.text) == neutral(other.text)


def neutral(text: str) -> str:
    """Without ids and times."""
    try:
        return json.dumps(json.loads(text) | {"id": "", "created": 0})
    except ValueError:
        events = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: {")]
        return "\n".join(neutral(event) for event in events) + text[-16:]


def test_models_outside_the_table_are_found(box: Served) -> None:
    for model, version in (("a@1", "a@1"), ("b", "b@2"), ("a@1", "a@1")):
        answer = box.post(model)
        assert (answer.status_code, answer.headers["x-lorad-version"]) == (200, version), answer.text
        assert answer.json()["model"] == model
    missing = [box.post(model) for model in ("nobody", "a@77", "a@x")]
    assert [answer.status_code for answer in missing] == [404, 404, 400]


def test_client_cannot_choose_the_version_by_header(box: Served) -> None:
    with box.http() as client:
        asked = {"model": "of-alice", "prompt": "1", "max_tokens": 1}
        answer = client.post("completions", json=asked, headers={"x-lorad-version": "a@1"})
    assert answer.headers["x-lorad-version"] == "a@2"


def test_owners_report_traffic_of_their_own_aliases(box: Served) -> None:
    def told() -> dict[str, int]:
        """Return the requests of each alias; -1: unknown."""
        rows = box.ask(BOB, "GET", "aliases")["items"]
        return {row["alias"]: (row["traffic"] or {"requests": -1})["requests"] for row in rows}

    assert box.says("of-alice") and box.says("of-alice") and box.says("of-bob")
    until(lambda: told()["of-alice"] >= 2 and told()["of-bob"] >= 1)
    file, others = (box.world.gateway_socket_of(uid).with_name(FILE) for uid in (ALICE, BOB))
    assert (file.stat().st_uid, file.stat().st_mode & 0o777) == (ALICE, 0o600)
    os.kill(box.gateway_of(ALICE), signal.SIGSTOP)  # what she writes now, it does not write over
    claim = '{"since": 0, "names": {"of-alice": {"requests": 777}, "of-bob": {"requests": 777}}}'
    as_user(ALICE, "sh", "-c", f"echo '{claim}' > {file}")
    assert told()["of-alice"] == 777 > told()["of-bob"] > 0
    as_user(ALICE, "ln", "-sf", str(others), str(file))
    assert told()["of-alice"] == -1
    os.kill(box.gateway_of(ALICE), signal.SIGCONT)
    until(lambda: 0 < told()["of-alice"] < 777)


def test_leaving_client_ends_its_request_in_the_pool(box: Served) -> None:
    pool = next(pool for pool in box.ask(BOB, "GET", "pools")["items"] if "a@2" in pool["loaded"])

    def running() -> int:
        found = next(one for one in box.ask(BOB, "GET", "pools")["items"] if one["pool"] == pool["pool"])
        return int(found["engine"]["running"] + found["engine"]["waiting"])

    asked = {"model": "of-alice", "prompt": ["7"] * 4, "max_tokens": 1900, "n": 8, "temperature": 2}
    with box.http() as client, client.stream("POST", "completions", json=asked | {"stream": True}) as answer:
        pieces = answer.iter_bytes()  # the end of it would be that of the answer
        assert next(pieces).startswith(b"data: ") and answer.status_code == 200
        until(lambda: running() > 0)
    until(lambda: running() == 0, 20)


def test_front_follows_no_link_to_a_socket(box: Served) -> None:
    socket = box.world.gateway_socket_of(ALICE)
    aside = socket.with_name("aside")
    assert not as_user(ALICE, "mv", str(socket), str(aside)).stderr
    # who answers there has the powers of the front
    as_user(ALICE, "ln", "-s", str(box.world.socket), str(socket))
    try:
        answer = box.post("of-alice")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2"), answer.text
    finally:
        socket.unlink()
        aside.rename(socket)
    assert box.says("of-alice")


def test_endless_template_delays_only_its_owner(box: Served) -> None:
    gateway = box.gateway_of(ALICE)
    with ThreadPoolExecutor(1) as others:
        asked = others.submit(box.post, "of-alice", messages=[{"role": "user", "content": "loop"}])
        for _ in range(3):
            began = time.monotonic()
            assert box.says("of-bob") and time.monotonic() - began < 10
            assert box.post("b@1").status_code == 200
        answer = asked.result()
    assert answer.status_code == 400 and "it takes over 3 s" in answer.text
    assert box.says("of-alice") and box.gateway_of(ALICE) == gateway
    assert box.post("of-alice", messages=[{"role": "user", "content": "7 3 1"}]).status_code == 200
    process = next(
        child for child in psutil.Process(gateway).children() if "template_child" in "".join(child.cmdline())
    )
    assert process.uids().real == ALICE


def test_new_daemon_keeps_running_gateways(box: Served) -> None:
    until(lambda: box.says("a@1"))
    pids = box.gateways
    box.daemon.kill()
    box.daemon.wait()
    assert box.says("of-alice") and box.says("of-bob") and box.post("a@1").status_code == 200
    box.replace(WARM)
    assert box.post("b").status_code == 200
    assert pids == box.gateways


def test_gateways_end_with_the_daemon_on_request(box: Served) -> None:
    until(lambda: box.says("of-alice") and box.says("of-bob"))
    pids = box.gateways
    assert Transport(box.world.socket, 60).ask("POST", "/v1/shutdown", ShutdownRequest(gateway=True))[
        "gateway"
    ]
    box.daemon.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    box.python = WARM
    box.daemon = box.start()
    until(lambda: box.says("of-alice") and box.says("of-bob"))


def test_hanging_gateway_ends_itself_and_says_where() -> None:
    done = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "in hang" in done.stderr
