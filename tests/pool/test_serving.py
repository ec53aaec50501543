"""The pool as others than its runs see it: served versions, slow and strange peers."""

import contextlib
import os
import socket
import struct
from pathlib import Path

import msgspec
import pytest

from lorad.errors import IntegrityError, NotFound
from lorad.pool.loaded import SPARE
from lorad.protocol import frames
from lorad.protocol.batch import Sampling
from lorad.protocol.calls import Answer, Call, Generate, LoadVersion, Nothing, Published
from lorad.protocol.connection import Connection
from lorad.protocol.listener import may_call, uid_of
from lorad.protocol.status import PoolStatus
from tests.kit.pool_kit import DEADLINE, Running, generate, learn, prompts, publish, texts, until

pytest_plugins = ["tests.kit.pool_fixtures"]


def load(connection: Connection, published: Published, directory: Path) -> None:
    connection.call("load_version", LoadVersion(published.version, str(directory), published.sha256))


def directory_of(root: Path, run: Connection, number: int) -> Path:
    return root / run.run / "versions" / f"{number:06d}"


def test_served_version_answers_as_its_run_sampled(run: Connection, running: Running, tmp_path: Path) -> None:
    learn(run)
    published = publish(run, tmp_path, 0)
    sampled = texts(generate(run, published.version))
    run.call("close", Nothing())
    with running.connect() as server:
        load(server, published, directory_of(tmp_path, run, 0))
        chunks = generate(server, published.version, verb="serve")
    assert texts(chunks) == sampled and {chunk.version for chunk in chunks} == {published.version}


def test_a_served_version_outlives_its_run(run: Connection, running: Running, tmp_path: Path) -> None:
    published = publish(run, tmp_path, 0)
    with running.connect() as server:
        load(server, published, directory_of(tmp_path, run, 0))  # loaded already: nothing is read
        run.call("close", Nothing())
        assert texts(generate(server, published.version, verb="serve"))


def test_version_without_load_is_not_served(running: Running) -> None:
    with running.connect() as server, pytest.raises(NotFound, match="nobody@3 is not loaded"):
        generate(server, "nobody@3", verb="serve")


def test_files_of_another_version_are_not_loaded(run: Connection, running: Running, tmp_path: Path) -> None:
    published = publish(run, tmp_path, 0)
    run.call("close", Nothing())
    wrong = msgspec.structs.replace(published, sha256="0" * 64)
    with running.connect() as server, pytest.raises(IntegrityError, match="have sha256"):
        load(server, wrong, directory_of(tmp_path, run, 0))


def test_served_versions_that_nobody_uses_are_bounded(
    run: Connection, running: Running, tmp_path: Path
) -> None:
    versions = [publish(run, tmp_path, number) for number in range(SPARE + 2)]
    run.call("close", Nothing())
    with running.connect() as server:
        for number, version in enumerate(versions):
            load(server, version, directory_of(tmp_path, run, number))
        loaded = [name for name in server.call("status", Nothing()).loaded if name.startswith(run.run)]
    assert loaded == sorted(version.version for version in versions[-SPARE:])


@pytest.mark.system
def test_a_reader_that_stops_reading_holds_up_nobody(running: Running, run: Connection) -> None:
    with running.connect() as slow:
        many = Generate("base", prompts(16, 4), Sampling(max_new_tokens=60))
        chunks = slow.stream("serve", many)
        next(chunks)
        assert learn(run).applied
        *_, result = chunks
    assert result.samples == 64


def test_abandoned_stream_is_ended(running: Running) -> None:
    with running.connect() as gone:
        next(gone.stream("serve", Generate("base", prompts(4, 4), Sampling(max_new_tokens=2000))))
    until(lambda: not running.pool.engine._calls)  # type: ignore[attr-defined]


def test_status_names_the_tenants_and_what_they_do(run: Connection) -> None:
    learn(run)
    status: PoolStatus = run.call("status", Nothing())
    tenant = next(tenant for tenant in status.tenants if tenant.run == run.run)
    assert (tenant.attempt, tenant.phase) == (1, "idle") and tenant.parameters > 0
    assert status.trainer_tokens_per_second > 0 and status.rss_bytes > 1e8


def test_unknown_verb_and_wrong_arguments_are_errors(running: Running) -> None:
    with running.connect() as connection:
        for call in (Call(1, "dance", {}), Call(2, "serve", {"version": 3})):
            for part in frames.encode(call):
                connection._socket.sendall(part)
            answer = frames.read(connection._socket.recv_into, Answer)
            assert (answer.id, answer.kind) == (call.id, "error")
        assert "serve: " in answer.body["message"]


def test_peer_of_another_protocol_is_cut_off(running: Running) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE)
        stranger.connect(running.config.socket)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_only_the_owner_and_root_may_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peer(socket.socket):
        def getsockopt(self, *_: object) -> bytes:  # type: ignore[override]
            return struct.pack("3i", 1, 1234, 1234)

    with Peer(socket.AF_UNIX) as peer:
        monkeypatch.setattr(os, "getuid", lambda: 1234)
        assert may_call(uid_of(peer))
        monkeypatch.setattr(os, "getuid", lambda: 1235)
        assert not may_call(uid_of(peer))
