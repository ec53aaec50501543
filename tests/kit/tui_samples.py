"""Samples and versions as a daemon would give them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from lorad.client.transport import Json
from lorad.errors import NotFound
from tests.kit.tui_world import User, World, a_run, screen_text, until

Answer = Callable[[Json], list[Json]]


def a_sample(number: int, index: int, step: int, **more: Any) -> Json:
    reward = (index + number + step) % 4 / 3
    words = {
        "prompt": f"Sort these: {number} 3 2",
        "completion": f"made at {step}, sample {index}",
        "answer": "2 3",
    }
    figures = {
        "reward": reward,
        "advantage": reward - 0.5,
        "tokens": [1] * (5 + index),
        "logprobs": [-0.5, -0.25],
    }
    name = {"step": step, "version": f"a@{step - 1}", "prompt_id": f"p{number}", "index": index}
    return {**name, **words, **figures, "finish": "stop", "error": "", **more}


def samples_of(step: int, prompts: Sequence[int], samples: int = 4) -> list[Json]:
    return [a_sample(prompt, index, step) for prompt in prompts for index in range(samples)]


def sampled(steps: dict[int, list[Json]], newest: int) -> Answer:
    """Answer with the samples of the steps that keep theirs."""

    def answer(query: Json) -> list[Json]:
        step = int(query.get("step", newest))
        if step not in steps:
            raise NotFound(
                f"samples/{step:06d}-a1.jsonl: No such file or directory", hint="See checkpoint.keep_samples."
            )
        return steps[step]

    return answer


def counted(asked: list[Json], answer: Answer) -> Answer:
    """`answer`, and every query in `asked`."""

    def noted(query: Json) -> list[Json]:
        asked.append(query)
        return answer(query)

    return noted


def a_world(steps: dict[int, list[Json]], **more: Any) -> World:
    """Make a world with a run named `a` that is at the last of these steps."""
    world = World(a_run("a", step=max(steps), steps=40, **more))
    world.answers["runs/a/samples"] = sampled(steps, max(steps))
    return world


def a_version(number: int, **more: Any) -> Json:
    parent = number - 1 if number else None
    said = {
        "loaded": False,
        "pinned": False,
        "aliases": [],
        "attested": "passed",
        "attestation": "bit for bit",
    }
    files = {"sha256": f"{number:064x}", "path": f"/runs/a/versions/{number:06d}", "bytes": 65536}
    shape = {"rank": 16, "alpha": 32.0, "parent": parent, "created_at": time.time() - 3600}
    return {"run": "a", "version": number, "step": number, **files, **shape, **said, **more}


async def opened(user: User, tab: int, holds: str) -> None:
    """A tab of the first run's screen, with that text in it."""
    await until(user, lambda: "a" in screen_text(user) and user.app.screen.query("#runs").first().has_focus)
    await user.press("enter")
    await until(user, lambda: user.app.screen.query("#tabs"))
    await user.press(str(tab))
    await until(user, lambda: holds in screen_text(user))
