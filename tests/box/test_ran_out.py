"""A process without file descriptors says so, and does not fill its log."""

import asyncio
import logging
import socket

import pytest

from lorad.box.ran_out import RanOut


async def test_refused_connections_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(RanOut())
    error = OSError(24, "Too many open files")
    for _ in range(100):
        loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
    assert [record.name for record in caplog.records] == ["lorad.box.ran_out"]


async def test_tries_after_the_end_are_not_said(caplog: pytest.LogCaptureFixture) -> None:
    loop, listener = asyncio.get_running_loop(), socket.socket()
    loop.set_exception_handler(RanOut())
    listener.close()
    loop.call_soon(loop._start_serving, asyncio.Protocol, listener)  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert not caplog.records


async def test_other_exceptions_of_a_loop_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(RanOut())
    for _ in range(2):
        loop.call_exception_handler({"message": "a task failed", "exception": ValueError()})
    assert [(record.name, record.levelno) for record in caplog.records] == [("asyncio", logging.ERROR)] * 2
