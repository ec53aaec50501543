"""OpenPipe ART, unmodified: GRPO on the questions of `cookbook_folder` by its backend for Tinker.

`python client_art.py NAME`: NAME is what the door calls the base. Prints the mean reward of each step.
"""

import asyncio
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import art
from art.tinker_native import TinkerNativeBackend

_STEPS, _GROUPS, _SIZE = 12, 4, 8


async def main(name: str, rows: list[dict[str, Any]]) -> None:
    inner = {"renderer_name": "role_colon", "training_client_args": {"rank": 8}}
    model = art.TrainableModel(
        name="digits", project="lorad", base_model=name, _internal_config={"tinker_native_args": inner}
    )
    backend = TinkerNativeBackend(path="art")
    await model.register(backend, {"server_args": {"host": "127.0.0.1"}})
    for step in range(_STEPS):
        asked = rows[step * _GROUPS : (step + 1) * _GROUPS]
        groups = await asyncio.gather(*[_group(model, row) for row in asked])
        rewards = [each.reward for group in groups for each in group.trajectories]
        print("reward", fmean(rewards), flush=True)
        await backend.train(model, groups, learning_rate=3e-3, loss_fn="importance_sampling")
    await backend.close()


async def _group(model: Any, row: dict[str, Any]) -> Any:
    return art.TrajectoryGroup(await asyncio.gather(*[_played(model, row) for _ in range(_SIZE)]))


async def _played(model: Any, row: dict[str, Any]) -> Any:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=row["prompt"], max_completion_tokens=20, temperature=1.0
    )
    choice = answer.choices[0]
    reward = float(row["answer"] in (choice.message.content or ""))
    return art.Trajectory(messages_and_choices=[*row["prompt"], choice], reward=reward)


if __name__ == "__main__":
    lines = Path("digits.jsonl").read_text().splitlines()
    asyncio.run(main(sys.argv[1], [json.loads(line) for line in lines]))
