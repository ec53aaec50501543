"""Requests of one program at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from lorad.driver.door.chains import Chains
from lorad.driver.door.chat import Chat, Refusal
from lorad.driver.door.door import Visit
from lorad.protocol.batch import Chunk, Sampling


class _Meets(list[Any]):
    """No tools, of which all who look wait for one another."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)

    def __bool__(self) -> bool:
        self._barrier.wait(30)
        return False


def test_no_program_gets_more_turns_at_once() -> None:
    format: Any = SimpleNamespace(first=lambda messages, tools: ("a", [1]), ends_turn=lambda token: True)
    numbers: list[int] = []

    def speak(context: list[int], turn: int, most: int) -> list[Chunk]:
        numbers.append(turn)
        return [Chunk("a", 0, "v@0", np.array([2], np.int32), np.zeros(1, np.float32), "stop")]

    visit = Visit(Chains(format), "v@0", Sampling(max_new_tokens=4), 3, 99, None, speak, lambda tokens: "b")
    chat = Chat([{"role": "user", "content": "a"}], _Meets(8), 4, False, False)

    def ask(_: int) -> bool:
        try:
            visit.answer(chat)
        except Refusal:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        answered = list(threads.map(ask, range(8)))
    assert answered.count(True) == 3
    assert sorted(numbers) == [0, 1, 2]
    assert visit.refused == "turns"
