"""A step whose agent programs share one process: what one of them does costs its own episodes alone."""

import shutil
from pathlib import Path

import msgspec
import pytest

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

async def run(base_url, task, sampling):
    """A turn; then its process is killed, is stuck, or the episode waits for too long."""
    body = {"messages": [{"role": "user", "content": "S:391="}], **sampling}
    await asyncio.to_thread(post, base_url, body)
    match task["prompt"]:
        case "kills":
            os.kill(os.getpid(), 9)
        case "blocks":
            time.sleep(600)
        case "waits":
            await asyncio.sleep(600)
    return 1.0
'''
FAULTS = {"kills": "SIGKILL", "blocks": "it took 5 s", "waits": "it took 5 s"}


def test_faults_cost_their_own_episodes_alone(tmp_path: Path) -> None:
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "agent.py").write_text(AGENT)
    prompts = [*FAULTS, *["returns"] * 29]
    rows = [msgspec.json.encode({"prompt": each, "answer": "-"}) for each in prompts]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(rows))
    how = (
        *("data.train=rows.jsonl", "data.prompts_per_step=32", "algorithm.group_size=2", "eval.every=0"),
        "env={name: 'agent.py:run', workers: 1, concurrency: 64, episode_timeout: 5, retry: 0}",
        *("trainer.steps=1", "deterministic=false", "reward.max_failures=0.5", "rollout.max_new_tokens=4"),
    )
    with running_pool(tmp_path, deterministic=False, model=str(model), model_path=str(model)) as pool:
        run = Driven(pool, tmp_path, "agents", f"model.path={model}", *how)
        end = run.drive()
    assert end.reason == "completed", end
    lines = (run.run.root / run.facts("step")[0].data["samples"]).read_text().splitlines()
    episodes = [msgspec.json.decode(line) for line in lines]
    assert len(episodes) == 64
    for episode in episodes:
        fault = FAULTS.get(episode["task"]["row"]["prompt"])
        assert episode["reward"] == (1.0 if fault is None else None), episode
        assert (fault or "") in episode["error"]
