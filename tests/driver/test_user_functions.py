"""A user's own loss and advantage: what they are given, and what each wrong one ends with."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lorad.children.user_process import code_of
from lorad.driver.user.functions import UserFunction, UserFunctions
from lorad.errors import SpecError
from lorad.rl.advantage import advantages
from lorad.rl.user.functions import AdvantageInput, LossInput, sample_of
from lorad.spec.algorithm import Algorithm
from lorad.spec.user_code import UserCode
from tests.driver.test_rewards import children

ROOT = Path(__file__).parents[2]
Make = Callable[..., UserFunction]

CLIP = """
import numpy as np
def loss(logprobs, old, advantages, mask):
    ratio = np.exp(logprobs - old)
    free, held = -ratio * advantages, -ratio.clip(0.8, 1.2) * advantages
    derivative = np.where(free >= held, free, 0.0) * mask / mask.sum()
    return (np.maximum(free, held) * mask).sum() / mask.sum(), derivative
"""
TORCH = """
import torch
from lorad.rl.user.autograd import differentiated
@differentiated
def loss(logprobs, old, advantages, mask):
    ratio = (logprobs - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -surrogate[mask].mean()
"""


def of_loss() -> LossInput:
    given = sample_of("loss", with_reference=True)
    assert isinstance(given, LossInput)
    return given


def of_advantage() -> AdvantageInput:
    given = sample_of("advantage", with_reference=False)
    assert isinstance(given, AdvantageInput)
    return given


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A function of some source text; its process must be gone when it is closed."""
    before, made = children(), []

    def make(source: str, kind: str = "loss", function: str = "", **limits: Any) -> UserFunction:
        (tmp_path / "mine.py").write_text(source)
        name = {kind: f"mine.py:{function or kind}"}
        algorithm = Algorithm(name="custom", user_code=UserCode(**limits), **name)  # type: ignore[arg-type]
        functions = UserFunctions(algorithm, tmp_path, "r1")
        made.append(functions)
        (found,) = functions.all
        return found

    yield make
    for functions in made:
        functions.__exit__()
    assert [process for process in children() if process not in before] == []


@pytest.mark.parametrize("source", [CLIP, TORCH])
def test_a_loss_gives_value_and_derivative(make: Make, source: str) -> None:
    given = of_loss()
    value, derivative = make(source).derivatives(given, seed=0)
    assert value == pytest.approx(-given.advantages.mean())
    assert derivative == pytest.approx(-given.advantages / 15)


def test_an_advantage_gets_what_lorads_own_does(make: Make) -> None:
    source = """
def advantage(rewards, group_sizes, lengths, info):
    from lorad.rl.advantage import advantages
    assert rewards.dtype == info["sampler"].dtype == float and info["ref"] is None
    assert (info["step"], info["truncated"].tolist()) == (1, [False] * 5) and lengths.sum() == 15
    return advantages(rewards, group_sizes)
"""
    given = of_advantage()
    found = make(source, "advantage").advantages(given)
    assert found.tolist() == advantages(given.rewards, given.group_sizes).tolist()


@pytest.mark.system
def test_stopped_gradients_go_without_a_value(make: Make) -> None:
    stopped = TORCH.replace("ratio = (logprobs - old).exp()", "ratio = (logprobs - old).exp().detach()")
    stopped = stopped.replace("return -surrogate[mask]", "return -(surrogate * logprobs)[mask]")
    with pytest.raises(SpecError, match="the derivative at token"):
        make(stopped).derivatives(of_loss(), seed=1)
    function = make(stopped.replace("@differentiated", "@differentiated(stops=True)"))
    value, derivative = function.derivatives(of_loss(), seed=1)
    assert value is None and derivative == pytest.approx(-of_loss().advantages / 15)


def test_derivatives_at_a_kink_are_right(make: Make) -> None:
    kink = "import numpy as np\ndef loss(logprobs, old): d = logprobs - old; return abs(d).sum(), np.{}(d)"
    make(kink.format("sign")).derivatives(of_loss(), seed=0)
    with pytest.raises(SpecError, match="finite differences"):
        make(kink.format("cos")).derivatives(of_loss(), seed=0)


def test_wrong_derivative_names_the_token_and_numbers(make: Make) -> None:
    with pytest.raises(SpecError) as refused:
        make(loss(SQUARES.format("3 * logprobs"))).derivatives(of_loss(), seed=0)
    said = r"loss of .*mine.py: the derivative at token (\d+) is (.*), but .* give (.*)"
    found = re.search(said, str(refused.value))
    assert found is not None and float(found[2]) == pytest.approx(1.5 * float(found[3]), rel=1e-3)
    assert float(found[2]) == pytest.approx(3 * of_loss().logprobs[int(found[1])], rel=1e-3)
    assert "float64" in refused.value.hint


def loss(body: str) -> str:
    return f"import numpy as np, os, time\ndef loss(logprobs, advantages):\n    {body}"


SQUARES = "return (logprobs ** 2).sum(), {}"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (SQUARES.format("2 * logprobs[:4]"), "a derivative of shape [4] for 15 tokens"),
        (SQUARES.format("np.log(logprobs)"), "the derivative of token 0 is nan, not a finite number"),
        ("return np.inf, logprobs", "the value of place 0 is inf"),
        ("return logprobs.sum()", "returned float64, not a pair"),
        ("return 0.0, 'no'", "returned str for a derivative"),
        ("raise ValueError('no such thing')", "mine.py:3: ValueError: no such thing"),
        ("return advantages[99], logprobs", "mine.py:3: IndexError"),
        ("os._exit(3)", "the loss process exited with 3"),
        ("while True: pass", "no result within 2 s (algorithm.user_code.timeout)"),
        ("np.ones(40 << 20)", "more than its limit of 256 MiB (algorithm.user_code.memory)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_wrong_loss_ends_with_its_own_error(make: Make, body: str, says: str) -> None:
    timeout = 2.0 if "while" in body else 60.0
    function = make(loss(body), timeout=timeout, memory="256MiB")
    with pytest.raises(SpecError) as refused:
        function.derivatives(of_loss(), seed=0)
    message = str(refused.value)
    assert message.startswith("algorithm.loss: ") and "mine.py" in message and says in message
    assert "`lorad resume r1`" in refused.value.hint


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return rewards[:3]", "returned advantages of shape [3] for 5 samples with 15 tokens"),
        ("return rewards / 0", "the advantage of sample 0 is inf, not a finite number (and 4 more)"),
        ("return [[1.0] * 5]", "returned advantages of shape [1, 5]"),
        ("return None", "returned advantages of shape []"),
    ],
)
def test_wrong_advantage_ends_with_its_own_error(make: Make, body: str, says: str) -> None:
    function = make(f"import numpy\nnumpy.seterr(all='ignore')\ndef advantage(rewards): {body}", "advantage")
    with pytest.raises(SpecError) as refused:
        function.advantages(of_advantage())
    assert str(refused.value).startswith("algorithm.advantage: ") and says in str(refused.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def lost(): pass", "has no function loss"),
        ("def loss(logprobs, target): pass", "needs target, which no loss is given"),
        ("def loss(logprobs, /): pass", "positional-only"),
        ("import not_there", "mine.py:1: ModuleNotFoundError"),
    ],
)
def test_unfit_function_is_refused_by_key(make: Make, source: str, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        make(source).start()
    assert says in str(refused.value) and refused.value.key == "algorithm.loss" and refused.value.hint


@pytest.mark.system
def test_a_large_batch_passes(make: Make) -> None:
    tokens, groups = 100_000, np.full(10, 10)
    numbers = np.linspace(-1, -0.1, tokens).astype(np.float32)
    ones, lengths = np.ones(tokens, bool), np.full(100, 1000)
    given = LossInput(numbers, numbers, numbers, None, numbers, ones, lengths, groups)
    _, derivative = make(CLIP).derivatives(given, seed=0)
    assert derivative == pytest.approx(-numbers.astype(np.float64) / tokens, rel=1e-6)


def test_no_call_sees_what_another_wrote(make: Make) -> None:
    source = "def loss(logprobs): d = 2 * logprobs; v = (logprobs ** 2).sum(); logprobs[:] = 0; return v, d"
    function = make(source)
    first, second = (function.derivatives(of_loss(), seed=0) for _ in range(2))
    assert first[0] == second[0] != 0.0


def test_user_functions_see_only_named_secrets(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "MY_KEY"):
        monkeypatch.setenv(name, "secret")
    source = "import os\ndef advantage(rewards): return rewards * {} + ('HF_TOKEN' in os.environ)"
    function = make(source.format("('MY_KEY' in os.environ)"), "advantage", env=["MY_KEY"])
    assert function.advantages(of_advantage()).tolist() == of_advantage().rewards.tolist()


@pytest.mark.system
def test_killed_driver_leaves_no_loss_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss():\n    open('called', 'w')\n    while True: pass")
    driver = f"""
from pathlib import Path
from lorad.driver.user.functions import UserFunctions
from lorad.spec.algorithm import Algorithm
UserFunctions(Algorithm(name="custom", loss="mine.py:loss"), Path({str(tmp_path)!r})).loss.try_out(
    with_reference=False)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", driver], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    while not (tmp_path / "called").exists():
        time.sleep(0.01)
    found = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(found, timeout=60)[1] == []


def test_file_of_code_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").touch()
    os.truncate(tmp_path / "rewards.py", 1 << 40)
    with pytest.raises(SpecError, match=r"rewards\.py cannot be read: larger than"):
        code_of("rewards.py:score", tmp_path, "reward", 0)
