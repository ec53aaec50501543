"""Attestation where trainer and engine are apart or bfloat16: names, amplified copies, and when which is
made.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lorad.errors import AttestationFailed, Conflict, Fenced, LoradError
from lorad.pool.attest.attester import MARK
from lorad.protocol.calls import Nothing
from lorad.protocol.connection import Connection
from tests.kit.fakes import faulty_engines
from tests.kit.pool_kit import OPEN, Running, generate, learn, publish, running_pool

LOADER_FAULTS = (
    "ServesBase",
    "ServesPrevious",
    "DoublesScale",
    "DropsTarget",
    "RollsA",
    "TransposesA",
    "ServesNaN",
)
WORDS = {
    ("ServesBase", 1): "like the base",
    ("ServesPrevious", 2): "amplified .* like the previous version",
}
NUMBERS = itertools.count()
BFLOAT16 = {"mode": "resident", "dtype": "bfloat16"}


@contextmanager
def opened(
    directory: Path, engine: str, every: int = 10, **changes: Any
) -> Iterator[tuple[Running, Connection]]:
    """A run with an open slot in a pool of its own. every: amplified_every."""
    options = {**BFLOAT16, "engine_class": f"tests.kit.fakes.{engine}"} | changes
    with running_pool(directory, **options) as running, running.connect("sorter") as connection:
        connection.call("open", replace(OPEN, amplified_every=every))
        yield running, connection


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("pool")
    with running_pool(
        directory, **BFLOAT16, engine_class="tests.kit.fakes.faulty_engines:Switched"
    ) as running:
        yield running


Opens = Callable[[int], Connection]


@pytest.fixture
def opens(running: Running) -> Iterator[Opens]:
    """A run with an open slot, given its amplified_every."""
    connections = []

    def opened(every: int = 10) -> Connection:
        connection = running.connect(f"sorter-{next(NUMBERS)}")
        connections.append(connection)
        connection.call("open", replace(OPEN, amplified_every=every))
        return connection

    yield opened
    for connection in connections:
        with contextlib.suppress(Fenced):
            connection.call("close", Nothing())
        connection.close()


@pytest.fixture
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the engine does wrong from the third version of the run on."""
    monkeypatch.setattr(faulty_engines.Switched, "fault", getattr(faulty_engines, request.param))
    return str(request.param)


def publish_until(
    connection: Connection, directory: Path, last: int, lr: float = 1e-5
) -> list[dict[str, float]]:
    """Versions 0 to `last`, a step apart: the facts of their attestations, all of which pass.

    One more step is made.
    """
    facts = []
    for number in range(last + 1):
        attestation = publish(connection, directory, number).attestation
        assert attestation.verdict == "passed", attestation
        facts.append(attestation.facts)
        learn(connection, seed=number, lr=lr)
    return facts


def amplified(facts: list[dict[str, float]]) -> list[int]:
    return [number for number, found in enumerate(facts) if "amplified" in found]


@pytest.mark.system(but=["ServesBase-1-10", "ServesPrevious-2-1", "DropsTarget-1-10", "ServesNaN-2-1"])
@pytest.mark.parametrize(("first", "every"), [(1, 10), (2, 1)])
@pytest.mark.parametrize("fault", LOADER_FAULTS, indirect=True)
def test_fault_below_the_noise_fails_its_publish(
    fault: str, first: int, every: int, opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty_engines.Faulty, "faulty_from", first + 1)
    run = opens(every)
    publish_until(run, tmp_path, first - 1)
    with pytest.raises(
        AttestationFailed, match=f"@{first} failed its attestation.*{WORDS.get((fault, first), '')}"
    ):
        publish(run, tmp_path, first)
    with pytest.raises(Conflict, match="not an attested version"):
        generate(run, f"{run.run}@{first}")
    loaded = [name for name in run.call("status", Nothing()).loaded if name.startswith(f"{run.run}@")]
    assert loaded == [f"{run.run}@{number}" for number in range(first)]


@pytest.mark.parametrize("fault", ["NameMeansBase", "NameMeansPrevious"], indirect=True)
def test_wrongly_resolved_name_fails_every_publish(fault: str, opens: Opens, tmp_path: Path) -> None:
    run = opens(0)
    publish_until(run, tmp_path, 1)
    with pytest.raises(AttestationFailed, match=r"@2 .* does not answer to its name as to a fresh copy"):
        publish(run, tmp_path, 2)


@pytest.mark.parametrize("fault", ["ServesBase"], indirect=True)
def test_copy_that_proves_nothing_is_amplified(fault: str, opens: Opens, tmp_path: Path) -> None:
    """The base, by name and by copy: a name test alone says that it says nothing."""
    run = opens(0)
    publish_until(run, tmp_path, 1)
    with pytest.raises(AttestationFailed, match=r"amplified .* like the base"):
        publish(run, tmp_path, 2)


@pytest.mark.parametrize(("every", "expected"), [(0, [1]), (2, [1, 3]), (1, [1, 2, 3])])
def test_first_change_and_every_kth_are_amplified(
    every: int, expected: list[int], opens: Opens, tmp_path: Path
) -> None:
    assert amplified(publish_until(opens(every), tmp_path, 3)) == expected


def test_a_later_attempt_is_amplified_again(opens: Opens, running: Running, tmp_path: Path) -> None:
    run = opens(10)
    publish_until(run, tmp_path, 2)
    with running.connect(run.run, attempt=2) as later:
        later.call("open", OPEN)
        learn(later)
        assert "amplified" in publish(later, tmp_path, 3).attestation.facts
        later.call("close", Nothing())


@pytest.mark.system
def test_twenty_clean_versions_pass(opens: Opens, tmp_path: Path) -> None:
    publish_until(opens(4), tmp_path, 19, lr=3e-4)


@pytest.mark.parametrize(("engine", "expected"), [("Sleeps", [1]), ("WakesWithOtherRounding", [1, 2, 3])])
def test_engine_returning_with_other_bits_is_amplified(
    engine: str, expected: list[int], tmp_path: Path
) -> None:
    with opened(tmp_path, f"sleeping_engines:{engine}", mode="timesliced") as (_, connection):
        assert amplified(publish_until(connection, tmp_path, 3)) == expected


@pytest.mark.system
def test_restart_during_a_publish_is_amplified(tmp_path: Path) -> None:
    with opened(tmp_path, "sleeping_engines:RestartsWithOtherRounding") as (_, connection):
        assert amplified(publish_until(connection, tmp_path, 3)) == [1, 2]


@pytest.mark.system
def test_engine_without_repeatable_bits_is_attested(tmp_path: Path) -> None:
    with opened(tmp_path, "faulty_engines:NeverRepeats") as (running, connection):
        publish_until(connection, tmp_path, 3, lr=1e-3)
        assert not running.pool.attester._repeats


@pytest.mark.system
def test_wrongly_resolved_name_is_found_within_noise(tmp_path: Path) -> None:
    with opened(tmp_path, "faulty_engines:NeverRepeatsNamesBase", every=0) as (_, connection):
        publish_until(connection, tmp_path, 1, lr=3e-3)
        with pytest.raises(AttestationFailed, match="sorter@2 failed"):
            publish(connection, tmp_path, 2)


def test_every_server_is_amplified(tmp_path: Path) -> None:
    with opened(tmp_path, "faulty_engines:SecondServerDropsTarget") as (_, connection):
        publish_until(connection, tmp_path, 0)
        with pytest.raises(AttestationFailed, match=r"sorter@1 .* amplified .* other tensors"):
            publish(connection, tmp_path, 1)


def test_copies_are_gone_whatever_happens(tmp_path: Path) -> None:
    with opened(tmp_path, "faulty_engines:FailsOnCopies") as (running, connection):
        publish(connection, tmp_path, 0)
        learn(connection)
        with pytest.raises(LoradError, match="no copies"):
            publish(connection, tmp_path, 1)
        assert list(running.pool.engine._versions.table) == ["sorter@0"]  # type: ignore[attr-defined]


def test_engine_without_room_for_copies_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, "faulty_engines:HoldsFour") as (running, connection):
        publish_until(connection, tmp_path, 1)
        with running.connect("other") as other:
            other.call("open", OPEN)
            publish(other, tmp_path, 0)
            with pytest.raises(Conflict, match=r"other@1 needs 2 \(one for the copies") as told:
                publish(other, tmp_path, 1)
        assert told.value.hint == "Unpin one, or let a run keep fewer. Loaded: other@0, sorter@0, sorter@1."


@pytest.mark.parametrize(
    ("changes", "copies"), [({"mode": "fused", "dtype": "float32"}, 0), ({"mode": "fused"}, 4)]
)
def test_copies_are_made_where_comparison_is_blind(
    changes: dict[str, Any], copies: int, tmp_path: Path
) -> None:
    """One for each name, one amplified."""
    with opened(tmp_path, "faulty_engines:Clean", **changes) as (running, connection):
        publish_until(connection, tmp_path, 2)
        assert sum(MARK in name for name in running.pool.engine._versions.names) == copies  # type: ignore[attr-defined]
