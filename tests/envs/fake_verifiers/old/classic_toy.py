"""An environment as they were written for verifiers 0.1 to 0.3."""

import asyncio
import os
import random

import verifiers as vf

together = most = 0


class Talk(vf.MultiTurnEnv):
    """Says something back; what else happens, the row says."""

    async def answer_to(self, row, text, turn):
        global together, most
        together += 1
        most = max(most, together)
        while row["answer"] == "meet" and most < 32:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        together -= 1
        if row["answer"] == "hang":
            await asyncio.sleep(600)
        if row["answer"] == "first waits" and is_first(self.waiting):
            await asyncio.sleep(600)
        if row["answer"] == "die":
            os.kill(os.getpid(), 9)
        if row["answer"] == "alone" and vf.Client.opened > 1:
            raise RuntimeError("clients are open")
        if row["answer"] == "raise":
            raise RuntimeError("a fault of the environment")
        return f"S:{turn}82="


def is_first(path):
    """Leave the number of this process at a path, where there is none yet."""
    if os.path.lexists(path):
        return False
    os.symlink(str(os.getpid()), path)
    return True


def rows(kind, count):
    is_game = kind.startswith("game")  # which begins alike, whatever is hidden
    return [
        {
            "prompt": [{"role": "user", "content": "Guess." if is_game else f"S:{n}=", "tool_calls": None}],
            "answer": f"word {n}" if kind == "game of words" else kind,
        }
        for n in range(count)
    ]


def load_environment(kind="single", count=40, evals=0, eval_kind="single", **settings):
    dataset = rows(kind, count)
    if kind == "shuffles":
        random.shuffle(dataset)
    if kind == "evaluates":
        return vf.SingleTurnEnv(None, rows(kind, 3))
    kinds = {"single": vf.SingleTurnEnv, "sandbox": vf.SandboxEnv}
    return kinds.get(kind, Talk)(dataset, rows(eval_kind, evals) if evals else None, **settings)
