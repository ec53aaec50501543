"""Prompts, completions and logs of the frozen world: usual ones, and such as attack a terminal."""

import random

import msgspec

HOSTILE = (
    "[bold red]not markup[/bold red] [link=file:///etc/passwd]nor a link[/] \x1b[31mnor red\x1b[0m "
    "\x1b]0;nor a title\x07 \x1b[2J\x1b[H"
)
MIXED = "答えは\N{ZERO WIDTH SPACE}４２です 🦉👩‍👩‍👧 \u202eright to left\u202c שלום, e\u0301\u0302\u0303 done"
QUESTIONS = (
    ("A shop sells 14 pencils a day and 3 times as many on Saturday. How many does it sell from Monday to "
        "Saturday?",
     "112"),
    ("Tom reads 12 pages an hour. How long does he need for 90 pages?", "7.5"),
    ("A tank of 240 litres leaks 3 litres an hour. What is left after a day?", "168"),
    ("Ann has 5 boxes of 24 apples and gives away a third. How many are left?", "80"),
)  # fmt: skip
RIGHT = (
    "Let me work through it step by step.\n\nFirst what is given, then the sum. So the answer is\n\n#### "
    "{answer}",
    "We write the numbers down, one after the other, and see that only the last line matters.\n#### {answer}",
    "#### {answer}",
)
WRONG = (
    "The question asks for a number.\nI multiply everything that I see and get\n\n#### {wrong}",
    "Hmm, wait. Let me think about it again. And again. It must be around {wrong}, but I am not sure at all",
)
REWARDS = ((1.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0), (0.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0))


def samples_of(base: str, step: int, version: int) -> bytes:
    """The lines of a step's samples: 4 prompts with 4 completions each."""
    chance, lines = random.Random(step), list[bytes]()
    for number, (prompt, answer) in enumerate(sorts(chance) if base == "builtin:tiny" else QUESTIONS):
        rewards = REWARDS[(number + step) % 4] if number else REWARDS[step % 3 and 2]
        mean = sum(rewards) / 4
        for index, reward in enumerate(rewards):
            text = completion(base, number, index, answer, reward)
            error = "ValueError: [b]no number[/b] in the completion" if (number, index) == (3, 3) else None
            lines.append(
                msgspec.json.encode(
                    {
                        "step": step,
                        "version": version,
                        "prompt_id": f"train/{16 * step + number}",
                        "index": index,
                        "prompt": prompt,
                        "completion": text,
                        "answer": answer,
                        "reward": reward,
                        "advantage": (reward - mean) / 0.43,
                        "finish": "length" if index == 3 and number == 2 else "stop",
                        "error": error,
                        "tokens": list(range(100, 101 + len(text) // 4)),
                        "logprobs": [round(-0.3 / (place + 1), 4) for place in range(1 + len(text) // 4)],
                    }
                )
            )
    return b"\n".join(lines) + b"\n"


def sorts(chance: random.Random) -> list[tuple[str, str]]:
    """Tasks of the builtin model."""
    digits = ["".join(chance.choices("0123456789", k=4)) for _ in range(4)]
    return [(f"S:{word}=", "".join(sorted(word))) for word in digits]


def completion(base: str, number: int, index: int, answer: str, reward: float) -> str:
    if (number, index) == (3, 1):
        return HOSTILE
    if (number, index) == (3, 2):
        return MIXED
    if base == "builtin:tiny":
        return answer if reward else answer[::-1]
    if reward:
        return RIGHT[index % 3].format(answer=answer)
    return WRONG[index % 2].format(wrong=17 * (number + 2) + index)


def hostile_log() -> bytes:
    """What user code may print."""
    return (
        b"reward.py:41: [red]UserWarning[/red]: no number in the completion\n"
        + f"{HOSTILE}\n{MIXED}\n".encode()
        + b"progress  10%\rprogress 100%\r\n\xff\xfe not UTF-8 \x00\x9b31m\n"
        + b"x" * 300
        + b"\nreward.py: 128 samples scored\n"
    )
