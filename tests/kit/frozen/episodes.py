"""Episodes with tools, and completions of held-out problems, of the frozen world."""

from typing import Any

import msgspec

from lorad.records.episodes import EpisodeTurn, ToolCall
from tests.kit.frozen.texts import HOSTILE, MIXED, QUESTIONS

ENDS = ("done", "turns", "length", "failed")
SETS = {"main": QUESTIONS[:2], "hard": QUESTIONS[2:]}


def episodes_of(step: int, version: int) -> bytes:
    """The lines of a step's samples: 2 questions with 4 episodes each, which end in each way."""
    lines = list[bytes]()
    for number, (question, answer) in enumerate(QUESTIONS[:2]):
        prompt = (
            "<|im_start|>system\nUse the calculator.<|im_end|>\n"
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        for index, end in enumerate(ENDS):
            turns = episode(answer, end, number)
            sampled = sum(turn.tokens for turn in turns)
            of_prompt: dict[str, object] = {
                "step": step,
                "version": version,
                "prompt_id": f"agent/{number}",
                "index": index,
            }
            texts = {"prompt": prompt, "completion": turns[-1].text, "answer": answer}
            reward = None if end == "failed" else float(end == "done")
            scores: dict[str, Any] = {
                "reward": reward,
                "advantage": None if reward is None else reward - 0.33,
            }
            scores["error"] = "the environment gave no answer within 30 s" if end == "failed" else None
            tokens: dict[str, Any] = {
                "tokens": list(range(sum(turn.tokens + turn.observed for turn in turns))),
                "logprobs": [round(-((7 * place) % 11) / 4, 4) for place in range(sampled)],
                "widths": [
                    4 if n < one.tokens - 1 else len(one.text) % 4 for one in turns for n in range(one.tokens)
                ],
            }
            kept: dict[str, Any] = {
                "turns": turns,
                "end": end,
                "finish": "length" if end == "length" else "stop",
            }
            kept |= {"rows": 2} if turns[-1].row else {}
            lines.append(msgspec.json.encode({**of_prompt, **texts, **scores, **tokens, **kept}))
    return b"\n".join(lines) + b"\n"


def episode(answer: str, end: str, number: int) -> list[EpisodeTurn]:
    """A call of the calculator, what it said, and an answer; one forgets its history on the way."""
    good, bad = called("calculator", "14*5+14*3"), called("calculater", "14*5")
    first = "<think>\nFive usual days, and Saturday.\n</think>\n\nI calculate it.\n" + good.written
    told = "<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    turns = [turn(first, told.format(answer), calls=(good,), reward=0.2)]
    if end == "turns":
        turns.append(turn(bad.written, told.format(bad.error), calls=(bad,), errors=1))
        turns.append(turn("Once more.\n" + bad.written, "", calls=(bad,), errors=1))
    elif end == "length":
        turns.append(turn("Let me list all days of the year. " * 12, "", finish="length"))
    elif end == "failed":
        turns[-1] = turn(first, HOSTILE + MIXED, calls=(good,))
        turns.append(turn("And now?", ""))
    elif number:
        turns[-1] = turn(first, "Summary: the calculator was asked once.", calls=(good,), observed=0)
        turns.append(turn(f"So it is **{answer}**.", "", row=1, reward=0.8))
    else:
        turns.append(turn(f"It sells **{answer}** pencils.\n\n#### {answer}", "", reward=0.8))
    return turns


def turn(
    text: str,
    observation: str,
    *,
    calls: tuple[ToolCall, ...] = (),
    errors: int = 0,
    reward: float = 0.0,
    finish: str = "stop",
    observed: int | None = None,
    row: int = 0,
) -> EpisodeTurn:
    size, answer = 1 + len(text) // 4, len(observation) // 4 if observed is None else observed
    return EpisodeTurn(text, finish, size, reward, observation, answer, 0.012, row, calls, errors)


def called(name: str, expression: str) -> ToolCall:
    arguments = {"expression": expression}
    written = (
        f"<tool_call>\n{msgspec.json.encode({'name': name, 'arguments': arguments}).decode()}\n</tool_call>"
    )
    if name == "calculator":
        return ToolCall(name, arguments, written=written)
    return ToolCall(
        name, arguments, f"there is no tool {name!r}; there are: calculator", "unknown_tool", written
    )


def completions_of(step: int, version: int) -> bytes:
    """The lines of an evaluation: two sets of two problems, which get better from step to step."""
    lines = list[bytes]()
    for name, problems in SETS.items():
        for number, (question, answer) in enumerate(problems, 1):
            is_right = step >= 80 or (step >= 70 and name == "main")
            said = f"At step {step} I say that it is\n\n#### {answer if is_right else 17}"
            line: dict[str, Any] = {"set": name, "problem": number, "step": step, "version": version}
            line |= {"prompt_id": f"{name}/{number}", "index": 0, "prompt": question, "completion": said}
            line |= {"answer": answer, "reward": float(is_right), "finish": "stop", "length": 20}
            lines.append(msgspec.json.encode(line))
    return b"\n".join(lines) + b"\n"
