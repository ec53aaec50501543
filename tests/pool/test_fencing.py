"""Fencing: nothing is done twice, and nobody out of date changes anything."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lorad.errors import Conflict, Fenced, NotFound
from lorad.pool.fencing import RECORDED, Fence
from lorad.protocol import frames
from lorad.protocol.batch import Sampling
from lorad.protocol.calls import Call, Generate, Logprobs, Nothing, Open, OptimStep, Stepped, Unload
from lorad.protocol.connection import Connection
from tests.kit.pool_kit import OPEN, Running, batch, generate, learn, prompts, publish, running_pool, until

STEP = OptimStep(lr=1e-3, max_grad_norm=0.0)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A run of this test's own."""
    return re.sub(r"[^a-z0-9]+", "-", request.node.name).strip("-")[5:60]


def opened(running: Running, run: str, attempt: int = 1) -> Connection:
    connection = running.connect(run, attempt)
    connection.call("open", OPEN)
    return connection


def send_and_hang_up(running: Running, call: Call, *, once_begun: bool = True) -> None:
    """A call whose caller is gone before any answer: as soon as it is under way, or at once."""
    with running.connect() as connection:
        for part in frames.encode(call):
            connection._socket.sendall(part)
        until(lambda: not once_begun or call.seq in running.pool.fence(call.run)._replies)


def repeated(running: Running, call: Call) -> Any:
    """The same call from a new connection."""
    with running.connect(call.run, call.attempt) as connection:
        connection._seq = call.seq - 1
        return connection.call(call.verb, call.args)


def norm_of(running: Running, run: str, *seeds: int) -> float:
    """The gradient norm of these batches, each computed once."""
    with opened(running, run) as connection:
        for seed in seeds:
            connection.call("forward_backward", batch(seed))
        stepped: Stepped = connection.call("optim_step", STEP)
    return stepped.grad_norm


def test_repeated_call_only_gets_its_recorded_reply(running: Running, run: str) -> None:
    with opened(running, run) as connection:
        connection.call("forward_backward", batch())
        first = connection.call("optim_step", STEP)
        before = connection.call("logprobs", Logprobs("slot", batch().batch)).logprobs
        assert repeated(running, Call(0, "optim_step", STEP, run, 1, 3)) == first
        assert np.array_equal(connection.call("logprobs", Logprobs("slot", batch().batch)).logprobs, before)
    assert first.grad_norm > 0


@pytest.mark.parametrize("once_begun", [True, False])
def test_repeated_call_adds_its_gradients_once(running: Running, run: str, once_begun: bool) -> None:
    call = Call(0, "forward_backward", batch(seed=3, samples=64), run, 1, 2)
    with opened(running, run) as connection:
        for _ in range(2):
            send_and_hang_up(running, call, once_begun=once_begun)
        assert repeated(running, call).tokens == call.args.batch.completions.size
        connection._seq = 2
        grad_norm = connection.call("optim_step", STEP).grad_norm
    with opened(running, run + "-once") as connection:
        connection.call("forward_backward", call.args)
        assert connection.call("optim_step", STEP).grad_norm == grad_norm


def test_an_error_is_recorded_as_well(running: Running, run: str) -> None:
    call = Call(0, "unload", Unload(f"{run}@7"), run, 1, 2)
    with opened(running, run) as connection:
        with pytest.raises(Conflict, match="not an attested version"):
            connection.call(call.verb, call.args)
        with pytest.raises(Conflict, match="not an attested version"):
            repeated(running, call)


def test_a_sequence_number_belongs_to_one_verb(running: Running, run: str) -> None:
    with (
        opened(running, run),
        pytest.raises(Conflict, match=r"call 1 of .* was open, now it is discard_grads"),
    ):
        repeated(running, Call(0, "discard_grads", Nothing(), run, 1, 1))


def test_call_older_than_all_recorded_is_refused(running: Running, run: str) -> None:
    with opened(running, run) as connection:
        for _ in range(RECORDED):
            connection.call("discard_grads", Nothing())
        with pytest.raises(Fenced, match="older than the 16 recorded"):
            repeated(running, Call(0, "open", OPEN, run, 1, 1))


@pytest.mark.parametrize("verb", ["open", "forward_backward", "optim_step", "generate", "logprobs", "close"])
def test_a_call_of_an_older_attempt_is_refused(running: Running, run: str, verb: str) -> None:
    args = {
        "open": OPEN,
        "forward_backward": batch(),
        "optim_step": STEP,
        "generate": Generate("base", prompts(), Sampling(max_new_tokens=4)),
        "logprobs": Logprobs("slot", batch().batch),
        "close": Nothing(),
    }
    with opened(running, run) as old, opened(running, run, attempt=2) as new:
        with pytest.raises(Fenced, match="attempt 2 has begun"):
            old.call(verb, args[verb])
        assert new.call("forward_backward", batch()).tokens > 0


def test_a_newer_attempt_begins_with_open(running: Running, run: str) -> None:
    with opened(running, run) as old, running.connect(run, attempt=2) as new:
        with pytest.raises(Conflict, match="it must be open"):
            new.call("optim_step", STEP)
        old.call("discard_grads", Nothing())  # the older attempt goes on


def test_a_slot_is_opened_once_in_an_attempt(running: Running, run: str) -> None:
    with opened(running, run) as connection, pytest.raises(Conflict, match="has an open slot"):
        connection.call("open", OPEN)


def test_newer_attempt_starts_without_gradients_and_versions(
    running: Running, run: str, tmp_path: Path
) -> None:
    expected = norm_of(running, run + "-alone", 1)
    with opened(running, run) as old:
        publish(old, tmp_path, 0)
        old.call("forward_backward", batch(seed=0))
        with opened(running, run, attempt=2) as new:
            until(lambda: f"{run}@0" not in new.call("status", Nothing()).loaded)
            with pytest.raises(Conflict, match="not an attested version"):
                generate(new, f"{run}@0")
            new.call("forward_backward", batch(seed=1))
            assert new.call("optim_step", STEP).grad_norm == expected


def test_newer_attempt_ends_samples_of_the_older(running: Running, run: str) -> None:
    with opened(running, run) as old:
        chunks = old.stream("generate", Generate("base", prompts(), Sampling(max_new_tokens=1500)))
        next(chunks)
        with opened(running, run, attempt=2), pytest.raises(Fenced, match="attempt 2 has begun"):
            list(chunks)


def test_closed_attempt_still_fences_the_older(running: Running, run: str) -> None:
    with opened(running, run) as old, opened(running, run, attempt=2) as new:
        new.call("close", Nothing())
        with pytest.raises(Fenced):
            old.call("open", OPEN)
        with pytest.raises(Conflict, match="has no open slot"):
            new.call("optim_step", STEP)


def test_calls_on_one_slot_come_one_after_another(running: Running, run: str) -> None:
    expected = norm_of(running, run + "-alone", 5, 6)
    calls = [Call(0, "forward_backward", batch(seed), run, 1, seq) for seq, seed in ((2, 5), (3, 6))]
    with opened(running, run):
        for call in calls:
            send_and_hang_up(running, call)
        assert repeated(running, Call(0, "optim_step", STEP, run, 1, 4)).grad_norm == expected


class Slow:
    """Work that ends once `may_end` is set."""

    def __init__(self) -> None:
        self.started, self.may_end, self.times = asyncio.Event(), asyncio.Event(), 0

    async def __call__(self) -> str:
        self.times += 1
        self.started.set()
        await self.may_end.wait()
        return "done"


async def nothing_to_abort(_: str) -> None:
    raise NotFound("no stream was expected here")


async def quick() -> str:
    return "quick"


def call(seq: int, attempt: int = 1, verb: str = "optim_step") -> Call:
    return Call(0, "open" if seq == 1 else verb, Nothing(), "r", attempt, seq)


async def test_repeated_call_waits_for_the_running_one() -> None:
    fence, work = Fence("r", nothing_to_abort), Slow()
    await fence.once(call(1), quick)
    first, again = (asyncio.create_task(fence.once(call(2), work)) for _ in range(2))
    await work.started.wait()
    first.cancel()  # its connection broke
    work.may_end.set()
    assert (await again, work.times) == ("done", 1)


async def test_newer_attempt_waits_for_computing_calls_only() -> None:
    fence, work = Fence("r", nothing_to_abort), Slow()
    await fence.once(call(1), quick)
    computing = asyncio.create_task(fence.once(call(2), work))
    await work.started.wait()
    queued = asyncio.create_task(fence.once(call(3), quick))
    await asyncio.sleep(0)
    newer = asyncio.create_task(fence.once(call(1, attempt=2), quick))
    await asyncio.sleep(0)
    assert not newer.done()
    work.may_end.set()
    assert (await computing, await newer) == ("done", "quick")
    with pytest.raises(Fenced):
        await queued


OLD_DRIVER = """
import sys
from pathlib import Path
from lorad.errors import Fenced
from lorad.protocol.connection import Connection
from tests.kit.pool_kit import OPEN, batch
connection = Connection(Path(sys.argv[1]), run="sleeper", attempt=1)
connection.call("open", OPEN)
print("open", flush=True)
try:
    while True:
        connection.call("forward_backward", batch())
except Fenced as error:
    print(error, flush=True)
"""


@pytest.mark.system
def test_a_stopped_driver_that_wakes_up_is_refused(running: Running) -> None:
    command = [sys.executable, "-c", OLD_DRIVER, running.config.socket]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as old:
        assert old.stdout is not None
        assert old.stdout.readline() == "open\n"
        os.kill(old.pid, signal.SIGSTOP)
        with opened(running, "sleeper", attempt=2) as new:
            learn(new)
            os.kill(old.pid, signal.SIGCONT)
            assert "attempt 2 has begun" in old.communicate(timeout=60)[0]
            new.call("forward_backward", batch(seed=1))
            grad_norm = new.call("optim_step", STEP).grad_norm
    assert grad_norm == norm_after_step(running)


def norm_after_step(running: Running) -> float:
    """What the new driver sees when nobody wakes up beside it."""
    with opened(running, "undisturbed") as connection:
        learn(connection)
        connection.call("forward_backward", batch(seed=1))
        stepped: Stepped = connection.call("optim_step", STEP)
    return stepped.grad_norm


def test_calls_need_a_run_and_a_number(running: Running, run: str) -> None:
    with running.connect("", attempt=1) as nobody, pytest.raises(Conflict, match="needs a run"):
        nobody.call("optim_step", STEP)
    with pytest.raises(Conflict, match="needs a run"):
        repeated(running, Call(0, "open", msgspec.structs.replace(OPEN, seed=1), run, 1, 0))


def test_open_says_what_was_opened(running: Running, run: str) -> None:
    with running.connect(run) as connection:
        made = connection.call("open", Open(modules=OPEN.modules[:2], rank=4, alpha=8.0))
    assert made.tensors == 4 and made.parameters > 0
