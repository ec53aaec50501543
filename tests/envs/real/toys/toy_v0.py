"""A verifiers environment of the old API (0.1 to 0.3): `kind`: single, tool, multi or group."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return int(a) + int(b)


class Echo(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        state["heard"] = state.get("heard", 0) + 1
        return [{"role": "user", "content": f"You said {len(str(messages[-1]))} letters. Again, please."}]


def right(completion, answer, **kwargs) -> float:
    return float(answer in str(completion[-1]))


def length(completion, **kwargs) -> float:
    return float(len(str(completion[-1])))


def ranked(completions, **kwargs) -> list[float]:
    sizes = [len(str(c)) for c in completions]
    return [1.0 if size == max(sizes) else 0.0 for size in sizes]


def load_environment(kind: str = "single", rows: int = 6):
    rows = [
        {"question": f"What is {n} + {n}?", "answer": str(2 * n), "info": {"n": n}}
        for n in range(1, rows + 1)
    ]
    data = Dataset.from_list(rows)
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    if kind == "tool":
        return vf.ToolEnv(dataset=data, tools=[add], rubric=rubric, max_turns=3)
    if kind == "multi":
        return Echo(dataset=data, rubric=rubric, max_turns=3, system_prompt="Be short.")
    if kind == "group":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[ranked], weights=[1.0]))
    return vf.SingleTurnEnv(dataset=data, rubric=rubric, system_prompt="Be short.")
