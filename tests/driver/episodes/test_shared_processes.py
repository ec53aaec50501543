"""Agent programs that share a process, or have no network: what one does costs its own episodes alone."""

import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.box.paths import private_directory
from tests.children.test_sandbox import works
from tests.driver.driven import Driven
from tests.driver.episodes.test_door import TEMPLATE
from tests.kit.pool_kit import TINY, running_pool

pytestmark = pytest.mark.system

AGENT = '''
import asyncio, json, os, time, urllib.request

def post(url, body):
    request = urllib.request.Request(
        url + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

async def refused(connecting):
    try:
        await connecting
    except OSError:
        return
    raise AssertionError("it got out of the sandbox")

async def run(base_url, task, sampling):
    """A turn; then its process is killed, is stuck, or the episode waits for too long."""
    body = {"messages": [{"role": "user", "content": "S:391="}], **sampling}
    await asyncio.to_thread(post, base_url, body)
    match task["prompt"]:
        case "looks around":
            await refused(asyncio.open_connection("127.0.0.1", task["port"]))
            await refused(asyncio.open_unix_connection(task["socket"]))
            return 1.0
        case "kills":
            os.kill(os.getpid(), 9)
        case "blocks":
            time.sleep(600)
        case "waits":
            await asyncio.sleep(600)
    return 1.0
'''
FAULTS = {"kills": "SIGKILL", "blocks": "it took 5 s", "waits": "it took 5 s"}


def episodes_of(home: Path, rows: list[dict[str, Any]], *how: str) -> list[dict[str, Any]]:
    """The episodes of a step with two of each row."""
    model = shutil.copytree(TINY, home / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (home / "agent.py").write_text(AGENT)
    (home / "rows.jsonl").write_bytes(b"\n".join(msgspec.json.encode({"answer": "-", **row}) for row in rows))
    run_with = (
        *("data.train=rows.jsonl", f"data.prompts_per_step={len(rows)}", "algorithm.group_size=2"),
        *("env.name=agent.py:run", "env.retry=0", "trainer.steps=1", "eval.every=0", "deterministic=false"),
        *("reward.max_failures=0.5", "rollout.max_new_tokens=4"),
    )
    with running_pool(home, deterministic=False, model=str(model), model_path=str(model)) as pool:
        run = Driven(pool, home, "agents", f"model.path={model}", *run_with, *how)
        end = run.drive()
    assert end.reason == "completed", end
    lines = (run.run.root / run.facts("step")[0].data["samples"]).read_text().splitlines()
    assert not private_directory(run.run.root / "door" / "training").exists()
    return [msgspec.json.decode(line) for line in lines]


def test_faults_cost_their_own_episodes_alone(tmp_path: Path) -> None:
    rows = [{"prompt": each} for each in (*FAULTS, *["returns"] * 29)]
    how = ("env.workers=1", "env.concurrency=64", "env.episode_timeout=5")
    episodes = episodes_of(tmp_path, rows, *how)
    assert len(episodes) == 64
    for episode in episodes:
        fault = FAULTS.get(episode["task"]["row"]["prompt"])
        assert episode["reward"] == (1.0 if fault is None else None), episode
        assert (fault or "") in episode["error"]


@pytest.mark.skipif(not works(), reason="bubblewrap is not installed, or may not do it here")
def test_a_sandboxed_program_reaches_the_model_alone(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.TemporaryDirectory(dir="/var/tmp") as place,
        socket.socket(socket.AF_UNIX) as local,
    ):
        path = f"{place}/socket"
        local.bind(path)
        local.listen()
        row = {"prompt": "looks around", "port": server.getsockname()[1], "socket": path}
        episodes = episodes_of(tmp_path, [row], "env.sandbox=bubblewrap", "env.workers=1")
    assert [(episode["reward"], episode["error"]) for episode in episodes] == [(1.0, "")] * 2
