"""What calls for a look, and what does not."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from lorad.alarms import Alarm, alarms
from lorad.box.config import AlarmLimits, load
from lorad.errors import SpecError
from lorad.records.daemon import Disk, Status
from lorad.records.devices import Device, DeviceProcess
from lorad.records.pools import Pool, PoolEngine, PoolTrainer
from lorad.records.runs import Run

Json = dict[str, Any]
NOW = 1_000_000.0
LIMITS = AlarmLimits()
CALM = {
    "at": NOW - 5,
    "begun": NOW - 5000,
    "kl": 0.01,
    "entropy": 1.2,
    "truncated": 0.1,
    "zero_variance": 0.2,
}


def run(state: str = "running", *, seconds: float = 1.0, **more: Any) -> Run:
    signals = more.pop("signals", CALM)
    about = {"name": "a", "state": state, "step": 7, "reward": 0.5, "started_at": NOW - 900, "detail": ""}
    return msgspec.convert(about | {"signals": signals, "rates": {"step_seconds": seconds}} | more, Run)


def of(run: Run, limits: AlarmLimits = LIMITS) -> list[str]:
    return [alarm.kind for alarm in alarms([run], limits, NOW)]


def test_a_run_that_goes_well_has_no_alarm() -> None:
    assert of(run()) == []


IDLE = {"idle_steps_total": 7.0, "zero_variance": 1.0, "truncated": 1.0}
NOTHING = (
    "7 of 7 steps changed nothing: in the last one all groups had one reward and 100% of the completions "
    "were cut at rollout.max_new_tokens"
)
MORE = "; `lorad why a` says more"


@pytest.mark.parametrize(
    ("state", "signals", "says"),
    [
        ("running", IDLE, [("bad", NOTHING)]),
        ("ended", IDLE, [("bad", NOTHING)]),
        ("ended", {"idle_steps_total": 4.0}, [("look", "4 of 7 steps changed nothing")]),
        (
            "ended",
            {"idle_steps_total": 7.0, "zero_variance": 0.0, "truncated": 1.0, "failed_rewards": 8.0},
            [("bad", "7 of 7 steps changed nothing")],
        ),
        ("ended", {"idle_steps_total": 3.0}, []),
        ("ended", {}, []),
    ],
)
def test_a_run_that_trains_nothing_says_so(state: str, signals: Json, says: list[tuple[str, str]]) -> None:
    found = alarms([run(state, signals=CALM | signals, ended_at=NOW - 60)], LIMITS, NOW)
    told = [(alarm.level, alarm.says) for alarm in found if alarm.kind == "idle"]
    assert told == [(level, f"{words}{MORE}") for level, words in says]


def test_the_first_idle_steps_are_no_alarm_yet() -> None:
    assert "idle" not in of(run(step=2, signals=CALM | {"idle_steps_total": 2.0}))
    ended = run("ended", step=2, signals=CALM | {"idle_steps_total": 2.0}, ended_at=NOW)
    assert of(ended) == ["idle"]


@pytest.mark.parametrize(
    ("signals", "kind"),
    [
        ({"kl": 0.6}, "kl"),
        ({"kl": math.nan}, "not-finite"),
        ({"entropy": math.inf}, "not-finite"),
        ({"not_finite": ["loss"]}, "not-finite"),
        ({"entropy": 0.001}, "entropy"),
        ({"explained_variance": -0.3}, "critic"),
        ({"zero_variance": 0.8}, "zero-variance"),
        ({"truncated": 0.9}, "truncation"),
        ({"logprob_difference": 0.2}, "logprobs"),
        ({"chosen_fall": 1.2}, "chosen"),
        ({"failed_rewards": 2.0}, "rewards"),
        ({"skipped_updates": 1.0}, "not-finite"),
        ({"attested": "inconclusive"}, "attestation"),
        ({"at": NOW - 121}, "stall"),
    ],
)
def test_a_signal_beyond_its_limit_is_one_alarm(signals: Json, kind: str) -> None:
    assert of(run(signals=CALM | signals)) == [kind]
    assert of(run("stopping", signals=CALM | signals)) == []


def test_nan_reward_is_a_named_alarm() -> None:
    (alarm,) = alarms([run(reward=math.nan)], LIMITS, NOW)
    assert (alarm.level, alarm.says) == ("bad", f"reward: NaN or infinite at step 7{MORE}")


@pytest.mark.parametrize(
    ("quiet", "seconds", "stalled"),
    [(119, 1.0, False), (121, 1.0, True), (121, 60.0, False), (601, 60.0, True)],
)
def test_patience_grows_with_the_length_of_steps(quiet: float, seconds: float, stalled: bool) -> None:
    assert (of(run(seconds=seconds, signals=CALM | {"at": NOW - quiet})) == ["stall"]) is stalled


def test_who_waits_for_requests_is_never_stalled() -> None:
    assert of(run(signals=CALM | {"at": NOW - 9000, "on_request": 1.0})) == []


@pytest.mark.parametrize(("begun", "stalled"), [(300, False), (601, True)])
def test_resumed_run_has_time_for_its_first_step(begun: float, stalled: bool) -> None:
    signals = CALM | {"at": NOW - 9000, "begun": NOW - begun}
    assert (of(run(signals=signals)) == ["stall"]) is stalled


@pytest.mark.parametrize(
    ("reason", "ago", "kind"),
    [
        ("failed", 60, "ended"),
        ("lost", 60, "ended"),
        ("failed", 3700, None),
        ("attestation_failed", 3700, "attestation"),
        ("attestation_failed", 90_000, None),
        ("completed", 60, None),
        ("killed", 60, None),
    ],
)
def test_bad_end_is_an_alarm_for_some_time(reason: str, ago: float, kind: str | None) -> None:
    ended = run("ended", reason=reason, ended_at=NOW - ago, detail="out of\nmemory", signals={"kl": 9.0})
    found = alarms([ended], LIMITS, NOW)
    assert [alarm.kind for alarm in found] == ([kind] if kind else [])
    assert all("out of memory" in alarm.says for alarm in found)


@pytest.mark.parametrize("part", ["engine", "trainer"])
def test_pool_without_engine_or_trainer_is_an_alarm(part: str) -> None:
    pool = Pool("tiny-1", engine=PoolEngine("vllm", alive=True), trainer=PoolTrainer("fsdp"))
    assert alarms((), LIMITS, NOW, pools=[pool]) == []
    gone = {"name": "x", "alive": False, "detail": "exit 1"}
    lost = msgspec.convert(msgspec.to_builtins(pool) | {part: gone}, Pool)
    assert alarms((), LIMITS, NOW, pools=[lost]) == [
        Alarm("bad", part, "pool", "tiny-1", f"its {part} x is gone: exit 1")
    ]


def test_memory_filled_by_others_is_an_alarm() -> None:
    ours = DeviceProcess(1, "ann", "lorad", 90 << 30, ours=True)
    device = Device("gpu:0", memory_total=100 << 30, memory_used=96 << 30, processes=[ours])
    theirs = DeviceProcess(2, "bob", "x", 6 << 30)
    (alarm,) = alarms((), LIMITS, NOW, devices=[device, replace(device, processes=[ours, theirs])])
    assert (alarm.kind, alarm.subject) == ("memory", "gpu:0") and "6.0 GiB by others (bob)" in alarm.says


def test_little_disk_and_daemon_troubles_are_alarms() -> None:
    status = Status(1, troubles=["reap a: OSError"], disk=Disk(1 << 30, 1 << 40))
    assert [(alarm.kind, alarm.on) for alarm in alarms((), LIMITS, NOW, status=status)] == [
        ("daemon", "daemon"),
        ("disk", "daemon"),
    ]
    assert alarms((), LIMITS, NOW, status=Status(1)) == []


def test_the_worst_comes_first() -> None:
    cut = run(name="b", signals=CALM | {"truncated": 0.9, "attested": "inconclusive"})
    found = alarms([cut, run(signals=CALM | {"kl": 3.0})], LIMITS, NOW)
    assert [alarm.kind for alarm in found] == ["kl", "attestation", "truncation"]


def test_null_limit_silences_all_but_nan(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("alarms: {kl: null, stall: null}")
    limits = load(tmp_path / "config.yaml").alarms
    assert of(run(signals=CALM | {"kl": 99.0, "at": 1.0}), limits) == []
    assert of(run(signals=CALM | {"kl": math.nan}), limits) == ["not-finite"]


@pytest.mark.parametrize("wrong", ["kl: 0", "truncated: 1.5", "stall: -1", "kl: .nan", "disk: 1.5", "kll: 1"])
def test_senseless_limits_are_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "config.yaml").write_text(f"alarms: {{{wrong}}}")
    with pytest.raises(SpecError, match=r"alarms|kll"):
        load(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("pairs", "last", "raised"), [(0.98, 0.02, True), (0.98, 0.3, False), (0.5, 0.02, False)]
)
def test_pairs_apart_and_a_worse_eval_is_one(pairs: float, last: float, raised: bool) -> None:
    now = run(signals=CALM | {"pair_accuracy": pairs, "chosen_fall": 0.4}, eval_first=0.23, eval_last=last)
    found = alarms([now], LIMITS, NOW)
    assert [alarm.kind for alarm in found] == ["chosen"] * raised
    assert all("algorithm.preference.nll" in alarm.says for alarm in found)
