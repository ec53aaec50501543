"""Rewards: the builtin ones, and a user's function that may do anything without hurting the run."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorad.driver.rewards import Rewarder, Score
from lorad.errors import SpecError
from lorad.rl.reward import RewardInput, builtin, number_in
from lorad.rl.rows.columns import text_of
from lorad.spec.reward import RewardSpec

ROOT = Path(__file__).parents[2]
Make = Callable[..., Rewarder]
Processes = Callable[[], list[psutil.Process]]


def sample(completion: str = "", answer: str = "", finish: str = "stop", **row: Any) -> RewardInput:
    return RewardInput("S:21=", completion, answer, finish, row)


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def processes() -> Processes:
    """List the processes that this test started."""
    before = children()
    return lambda: [process for process in children() if process not in before]


@pytest.fixture
def make(tmp_path: Path, processes: Processes) -> Iterator[Make]:
    """A Rewarder of some source text; its processes must be gone when it is closed."""
    made: list[Rewarder] = []

    def make(source: str, function: str = "reward", **settings: Any) -> Rewarder:
        (tmp_path / "rewards.py").write_text(source)
        made.append(Rewarder([RewardSpec(name=f"rewards.py:{function}", **settings)], tmp_path))
        return made[-1]

    yield make
    for rewarder in made:
        rewarder.close()
    assert processes() == []


@pytest.mark.parametrize(
    ("completion", "finish", "value"),
    [("12", "stop", 1), (" 12\n", "stop", 1), ("12", "length", 0), ("123", "stop", 0), ("", "stop", 0)],
)
def test_exact_match_wants_the_answer_and_an_end(completion: str, finish: str, value: float) -> None:
    assert builtin("exact_match")(sample(completion, "12", finish)) == value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("so 3 + 4 = 7\n#### 7", "3+4=7 #### 7", 1),
        ("#### 1,234", "1234", 1),
        ("#### $1,234.00.", "#### 1234", 1),
        ("#### 3 no #### 4", "#### 4", 1),
        ("#### 4 no #### 3", "#### 4", 0),
        ("#### -5", "#### -5", 1),
        ("#### -$5", "#### -5", 1),
        ("#### 0", "it was 5 #### 0", 1),
        ("#### 5", "it was 5 #### 0", 0),
        ("#### .5 apples", "0.50", 1),
        ("7", "7", 0),
        ("#### seven", "seven", 0),
        ("####", "#### 7", 0),
    ],
)
def test_gsm8k_compares_the_last_marked_number(completion: str, answer: str, value: float) -> None:
    assert builtin("gsm8k")(sample(completion, answer)) == value


@pytest.mark.parametrize(
    ("numbers", "value"),
    [
        ("18|18.00|18 eggs.|**18**|$18|18 €|18%|\\boxed{18}|１８|$18$|18 m^2|18 km/h", "18"),
        ("1,000|1 000|1\xa0000|1'000|1.000,00|1{,}000|1e3|1 × 10^3|1 \\times 10^{3}", "1000"),
        ("1,5|1 1/2|1\\frac{1}{2}|3/2|1.50", "1.5"),
        ("-5|−5|–5|-$5|$-5|(-5)|－５", "-5"),
        ("1/2|\\frac{1}{2}|.5|0,500", "0.5"),
        ("1,234,567.5|12,34,567.5|1.234.567,5", "1234567.5"),
    ],
)
def test_gsm8k_compares_numbers_by_value(numbers: str, value: str) -> None:
    read = {number: builtin("gsm8k")(sample(f"#### {number}", value)) for number in numbers.split("|")}
    assert read == dict.fromkeys(numbers.split("|"), 1.0)


SEVERAL = "3:30|5-6|5 – 6|20 - 2 = 18|10^2|10²|1/0|2024-01-01|1e3|1/2|1,5|x = 5|1½|12,345,67"


@pytest.mark.parametrize("number", SEVERAL.split("|"))
def test_gsm8k_takes_no_beginning_of_a_number(number: str) -> None:
    begins = [str(value) for value in (1, 2, 3, 5, 6, 10, 12, 15, 18, 20, 345, 2024)]
    assert not any(builtin("gsm8k")(sample(f"#### {number}", begin)) for begin in begins)
    assert number_in(f"{number} " * 30_000) in (None, number_in(number))  # at once


FIRST = "18 dollars for 3 eggs|18 (9 eggs at $2)|18, not 19|18; 3|18% (3 x 6)|18 m^2 of 20|18 or 19|18 12"


@pytest.mark.parametrize("line", FIRST.split("|"))
def test_gsm8k_takes_the_first_of_several_numbers(line: str) -> None:
    """As verl's `gsm8k.extract_solution`."""
    assert re.findall(r"#### (\-?[0-9\.\,]+)", f"#### {line}")[-1].replace(",", "") == "18"
    values = [
        builtin("gsm8k")(sample(f"#### {line}", answer)) for answer in ("18", f"#### {line}", "3", "19")
    ]
    assert values == [1, 1, 0, 0] and number_in(f"{line} " * 30_000) == 18


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        (12.0, "12"),
        (-3.0, "-3"),
        (12.5, "12.5"),
        (Decimal("12.00"), "12"),
        (date(2026, 5, 4), "2026-05-04"),
        (["Zürich", 1], '["Zürich", 1]'),
        ({"städte": ["東京"]}, '{"städte": ["東京"]}'),
        ("12.0", "12"),
        ("Zu\u0308rich", "Zürich"),
        ("one\r\ntwo", "one\ntwo"),
    ],
)
def test_builtins_know_answers_in_any_type(answer: Any, completion: str) -> None:
    equal, other = (sample(text, text_of(answer)) for text in (completion, f"{completion}1"))
    for reward in (builtin("exact_match"), builtin("regex", r"^(?P<answer>(?s:.*))$")):
        assert [reward(equal), reward(other)] == [1.0, 0.0]


def test_regex_searches_and_can_compare_with_the_answer() -> None:
    assert builtin("regex", r"^\d+$")(sample("123")) == 1
    assert builtin("regex", r"^\d+$")(sample("12a")) == 0
    boxed = builtin("regex", r"boxed\{(?P<answer>\d+)\}")
    assert [boxed(sample("boxed{12}", answer)) for answer in ("12", "13")] == [1, 0]


@pytest.mark.parametrize(
    ("name", "pattern", "says"),
    [
        ("exact", None, "no builtin 'exact'"),
        ("regex", None, "reward.pattern: missing"),
        ("regex", "(", "not compile"),
    ],
)
def test_impossible_builtin_is_refused_at_once(name: str, pattern: str | None, says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        Rewarder([RewardSpec(name=name, pattern=pattern)], Path())
    assert refused.value.hint


def test_builtins_need_no_process(tmp_path: Path, processes: Processes) -> None:
    with Rewarder([RewardSpec()], tmp_path) as rewarder:
        assert rewarder.score([sample("12", "12"), sample("1", "12")]) == [Score(1.0), Score(0.0)]
        assert processes() == []


@pytest.mark.system
def test_endless_pattern_fails_only_its_sample(tmp_path: Path) -> None:
    spec = RewardSpec(name="regex", pattern="^(a+)+$", timeout=1.0)
    with Rewarder([spec], tmp_path) as rewarder:
        scores = rewarder.score([sample("a" * 40 + "b"), sample("aa")])
    assert [score.value for score in scores] == [None, 1.0]


def test_a_function_gets_the_keywords_that_it_names(make: Make) -> None:
    rewarder = make(
        "def reward(completion, level, answer='x', absent=5): return level + len(completion) + absent"
    )
    assert rewarder.lacking({}, has_answers=True) == {"rewards.py:reward": ["level"]}
    assert rewarder.score([sample("abc", level=10, unused=1)])[0].value == 18


def test_function_with_open_keywords_gets_everything(make: Make) -> None:
    rewarder = make(
        "def reward(**given): return sorted(given) == ['answer', 'completion', 'finish', 'prompt', 'x']"
    )
    assert rewarder.score([sample(x=1, prompt="of the row")])[0].value == 1.0


def test_reward_can_import_its_neighbour_and_print(
    make: Make, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "near.py").write_text(
        "import os\ndef value():\n    print('hello'); os.write(1, b'raw'); return 2"
    )
    rewarder = make("import near\ndef reward(): return near.value()")
    assert rewarder.score([sample()])[0].value == 2
    rewarder.close()  # what it printed is in the log by then
    assert "hello" in capfd.readouterr().err


BAD = """
import ctypes, os, sys, time
import numpy as np
def reward(completion):
    if completion == "raise":
        raise ValueError("no such thing")
    if completion == "nan": return float("nan")
    if completion == "none": return None
    if completion == "text": return "1.0"
    if completion == "exit": os._exit(3)
    if completion == "sys.exit": sys.exit("bye")
    if completion == "segfault": ctypes.string_at(0)
    if completion == "hang": time.sleep(1000)
    if completion == "stdin": return len(sys.stdin.read())
    if completion == "bool": return True
    if completion == "numpy": return np.float32(0.5)
    return 1
"""


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("raise", "rewards.py:6: ValueError: no such thing"),
        ("nan", "returned nan, not a finite number"),
        ("none", "returned NoneType, not a number"),
        ("text", "returned str, not a number"),
        ("exit", "the reward process exited with 3"),
        ("sys.exit", "rewards.py:11: SystemExit: bye"),
        ("segfault", "the reward process died of SIGSEGV"),
        ("hang", "no result within 2 s"),
    ],
)
def test_a_bad_sample_fails_alone_and_says_why(completion: str, says: str, make: Make) -> None:
    rewarder = make(BAD, timeout=2.0 if completion == "hang" else 60.0)
    rewarder.score([sample("good")])  # the first call of a process has more time
    scores = rewarder.score([sample("good"), sample(completion), sample("good")])
    assert [score.value for score in scores] == [1.0, None, 1.0]
    assert says in scores[1].error


@pytest.mark.parametrize(("retries", "values"), [(0, [1.0, None, 2.0]), (1, [1.0, 3.0, 2.0])])
def test_failed_sample_is_retried_after_the_others(
    retries: int, values: list[float | None], make: Make, tmp_path: Path
) -> None:
    source = f"""
import pathlib
def reward(completion):
    calls = pathlib.Path({str(tmp_path)!r}, "calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    assert completion != "bad" or len(calls.read_text()) > 3
    return len(calls.read_text()) - (completion == "last" or completion == "bad")
"""
    scores = make(source, retries=retries).score([sample("first"), sample("bad"), sample("last")])
    assert [score.value for score in scores] == values


@pytest.mark.parametrize(("completion", "value"), [("stdin", 0.0), ("bool", 1.0), ("numpy", 0.5)])
def test_whatever_is_a_number_is_a_reward(completion: str, value: float, make: Make) -> None:
    assert make(BAD).score([sample(completion)])[0].value == value


def test_a_large_sample_passes(make: Make) -> None:
    assert (
        make("def reward(completion): return len(completion)").score([sample("x" * 3_000_000)])[0].value
        == 3e6
    )


def test_what_user_code_started_is_killed_with_it(make: Make, processes: Processes) -> None:
    source = "import subprocess\ndef reward():\n    subprocess.Popen(['sleep', '1000'])\n    return 1"
    rewarder = make(source)
    rewarder.score([sample()])
    started = processes()
    assert len(started) == 3  # the guard among them
    rewarder.close()
    assert psutil.wait_procs(started, timeout=60)[1] == []


ESCAPES = """
import pathlib, subprocess, time
def reward(completion):
    if completion:
        pathlib.Path(completion).write_text(
        str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
        time.sleep(1000)
    return 1
"""


def test_timeout_kills_processes_that_left_their_session(make: Make, tmp_path: Path) -> None:
    left = tmp_path / "pid"
    rewarder = make(ESCAPES, timeout=2.0)
    rewarder.score([sample()])  # the first call of a process has more time
    scores = rewarder.score([sample(str(left)), sample()])
    assert [score.value for score in scores] == [None, 1.0]
    assert not psutil.pid_exists(int(left.read_text()))


def test_endless_prints_of_a_reward_are_cut(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    source = "def reward():\n    for _ in range(1024): print('x' * 65535)\n    return 1"
    rewarder, began = make(source, timeout=60), time.monotonic()
    assert rewarder.score([sample()])[0].value == 1.0
    rewarder.close()
    printed, seconds = capfd.readouterr().err, time.monotonic() - began
    assert (
        len(printed) < (5 << 20) + seconds * (256 << 10)
        and "bytes of what user code printed were left out here" in printed
    )


def test_user_code_sees_only_secrets_the_spec_names(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os\ndef reward(completion): return completion in os.environ"
    for name in ("HF_TOKEN", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    scores = make(source, env=["JUDGE_KEY"]).score(
        [sample(name) for name in ("HF_TOKEN", "JUDGE_KEY", "PATH")]
    )
    assert [score.value for score in scores] == [0.0, 1.0, 1.0]


def test_sample_over_the_memory_limit_fails_alone(make: Make) -> None:
    source = (
        "kept = []\ndef reward(completion):\n    kept.append(bytearray(int(completion) << 20))\n    return 1"
    )
    scores = make(source, memory="256MiB").score([sample("1"), sample("400"), sample("150"), sample("1")])
    assert [score.value for score in scores] == [1.0, None, 1.0, 1.0]
    assert "needs more than its limit of 256 MiB (reward.memory)" in scores[1].error


def test_closing_ends_a_score_of_another_thread(make: Make, processes: Processes) -> None:
    rewarder = make("import time\ndef reward(): time.sleep(1000)", timeout=1000)
    scores: list[Score] = []
    thread = threading.Thread(target=lambda: scores.extend(rewarder.score([sample(), sample()])))
    thread.start()
    while not processes():
        time.sleep(0.01)
    rewarder.close()
    thread.join(timeout=60)
    assert [score.value for score in scores] == [None, None]


@pytest.mark.parametrize(
    ("source", "function", "says"),
    [
        ("def reward(): return 1", "rewrad", "has no function rewrad"),
        (
            "x = 1\nimport not_there",
            "reward",
            "rewards.py:2: ModuleNotFoundError: No module named 'not_there'",
        ),
        ("def reward(:", "reward", "rewards.py:1: SyntaxError"),
        ("reward = 3", "reward", "has no function reward"),
        ("def reward(completion, /): return 1", "reward", "positional-only"),
        ("import os; os._exit(4)", "reward", "the reward process exited with 4 while"),
    ],
)
def test_unloadable_function_is_refused_with_its_line(
    source: str, function: str, says: str, make: Make, processes: Processes
) -> None:
    rewarder = make(source, function)
    with pytest.raises(SpecError, match=says.replace("(", r"\(")) as refused:
        rewarder.start()
    assert refused.value.hint
    assert says in rewarder.score([sample()])[0].error
    assert processes() == []


def test_a_missing_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no file"):
        Rewarder([RewardSpec(name="nowhere/rewards.py:reward")], tmp_path)


def test_killed_driver_leaves_no_reward_process(
    tmp_path: Path,
) -> None:
    (tmp_path / "rewards.py").write_text("import re\ndef reward(): re.match('(a+)+$', 'a' * 40 + 'b')")
    driver = f"""
from pathlib import Path
from lorad.driver.rewards import Rewarder
from lorad.rl.reward import RewardInput
from lorad.spec.reward import RewardSpec
Rewarder([RewardSpec(name="rewards.py:reward", timeout=1000)], Path({str(tmp_path)!r})).score(
    [RewardInput("", "", "", "stop")])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", driver], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    driver_process = psutil.Process(process.pid)
    while len(children := driver_process.children(recursive=True)) < 2 or children[1].cpu_times().user < 0.3:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert psutil.wait_procs(children, timeout=60)[1] == []


SLOW = "import time\ndef reward(completion):\n    time.sleep(0.3)\n    return len(completion)"


def test_slow_samples_are_spread_over_workers(make: Make) -> None:
    rewarder = make(SLOW, workers=6)
    rewarder.start()
    started = time.monotonic()
    assert [s.value for s in rewarder.score([sample("x" * i) for i in range(24)])] == list(range(24))
    assert time.monotonic() - started < 24 * 0.3 * 0.7


def test_quick_samples_need_one_process(make: Make, processes: Processes) -> None:
    rewarder = make("def reward(completion): return len(completion)", workers=6)
    rewarder.start()
    rewarder.score([sample("x") for _ in range(40)])
    assert len(processes()) == 2  # the guard among them


@pytest.mark.parametrize("workers", [1, 3])
def test_death_costs_its_sample_with_any_workers(make: Make, workers: int) -> None:
    source = BAD.replace("return 1\n", "time.sleep(0.1); return 1\n")
    rewarder = make(source, workers=workers, timeout=60.0)
    scores = rewarder.score([sample(c) for c in ("good", "exit", "good", "raise", "good", "segfault")])
    assert [s.value for s in scores] == [1.0, None, 1.0, None, 1.0, None]
    assert "exited with 3" in scores[1].error and "SIGSEGV" in scores[5].error


ASYNC = """
import asyncio, os, time
async def reward(completion):
    if completion == "exit": os._exit(3)
    if completion == "block": time.sleep(1000)
    if completion == "hang": await asyncio.sleep(1000)
    if completion == "sys.exit": raise SystemExit("bye")
    await asyncio.sleep(0.5)
    return len(completion)
"""


def test_coroutines_are_under_way_together(make: Make) -> None:
    rewarder = make(ASYNC, workers=1)
    rewarder.start()
    started = time.monotonic()
    assert [s.value for s in rewarder.score([sample("x" * i) for i in range(60)])] == list(range(60))
    assert time.monotonic() - started < 60 * 0.5 * 0.3


def test_concurrency_bounds_coroutines_under_way(make: Make) -> None:
    source = """
import asyncio
now = most = 0
async def reward():
    global now, most
    now += 1
    most = max(now, most)
    await asyncio.sleep(0.05)
    now -= 1
    return most
"""
    scores = make(source, workers=1, concurrency=3).score([sample() for _ in range(12)])
    assert max(s.value or 0 for s in scores) == 3


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("exit", "the reward process exited with 3"),
        ("block", "no result within 1 s"),
        ("hang", "no result within 1 s"),
        ("sys.exit", "SystemExit: bye"),
    ],
)
def test_a_bad_coroutine_fails_alone(completion: str, says: str, make: Make) -> None:
    rewarder = make(ASYNC, workers=1, timeout=1.0, retries=0)
    rewarder.score([sample()])  # the first call of a process has more time
    scores = rewarder.score([sample("a"), sample(completion), sample("ab"), sample("abc")])
    assert [s.value for s in scores] == [1.0, None, 2.0, 3.0]
    assert says in scores[1].error


LISTS = """
import os
def reward(prompts, completions, level, groups, **rest):
    if "exit" in completions: os._exit(3)
    assert len(prompts) == len(level) == len(groups)
    best = max(map(len, completions))
    return [None if c == "none" else float("nan") if c == "nan" else len(c) / best for c in completions]
"""


def in_groups(rewarder: Rewarder, *groups: list[str]) -> list[Score]:
    return rewarder.begin([[sample(c, level=1) for c in group] for group in groups]).scores()


def test_a_function_of_lists_gets_each_group(make: Make) -> None:
    scores = in_groups(
        make(LISTS, retries=0), ["a", "ab"], ["abc", "abcdef"], ["exit", "a"], ["nan", "abcde"]
    )
    assert [s.value for s in scores] == [0.5, 1.0, 0.5, 1.0, None, None, None, 1.0]
    assert "exited with 3" in scores[5].error and "nan, not a finite number" in scores[6].error


def test_batch_size_joins_whole_groups(make: Make) -> None:
    source = "def reward(completions, groups): return [10 * len(completions) + g for g in groups]"
    scores = in_groups(make(source, batch_size=3), ["a", "b"], ["c", "d"], ["e"])
    assert [s.value for s in scores] == [40, 40, 41, 41, 10]


def test_lists_of_another_length_are_refused(make: Make) -> None:
    scores = in_groups(make("def reward(completions): return [1.0]"), ["a", "b"])
    assert "returned 1 rewards for 2 completions" in scores[0].error


def test_rewards_add_up_by_weight(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text("def brief(completion): return {'short': 1.0, 'long': len(completion)}")
    (tmp_path / "may.py").write_text("def maybe(completions): return [None for c in completions]")
    specs = [
        RewardSpec(),
        RewardSpec(name="near.py:brief", weight=0.5),
        RewardSpec(name="may.py:maybe", label="other"),
    ]
    with Rewarder(specs, tmp_path) as rewarder:
        score = rewarder.score([sample("12", "12")])[0]
    assert score.value == 2.5
    assert score.parts == {"exact_match": 1.0, "brief": 3.0, "brief/short": 1.0, "brief/long": 2.0}


def test_one_failed_reward_leaves_the_sample_out(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def bad(): raise ValueError('no')")
    with Rewarder([RewardSpec(), RewardSpec(name="bad.py:bad")], tmp_path) as rewarder:
        score = rewarder.score([sample("12", "12")])[0]
    assert score.value is None and score.error.startswith("bad: ") and "ValueError: no" in score.error


def test_components_may_name_the_reward(make: Make) -> None:
    score = make("def reward(): return {'reward': 3, 'a': 1, 'b': True}").score([sample()])[0]
    assert (score.value, score.parts) == (3.0, {"a": 1.0, "b": 1.0})
    score = make("def reward(): return {'a b': 1}").score([sample()])[0]
    assert score.value is None and "short names" in score.error
