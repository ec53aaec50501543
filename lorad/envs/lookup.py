"""The environment `lookup`: two turns with a tool, which the builtin base learns on a CPU in minutes."""

import difflib
from typing import Any

from lorad.envs.protocol import Observation, Turn

_TRIES = 3
_FOUND = 0.2
_NEAR = 0.4
_SOLVED = 1.0


class Lookup:
    """A store is asked for a value by writing its key backwards; the value is to be given back sorted.

    `R:abcd=` asks for a key. The model writes `dcba` and reads `S:391=`, a value that it could not know, and
    answers `139`. A wrong key is asked for again, three times at most.

    The reward is 0.2 for the call, up to 0.6 for an answer that is near, 1 for the right one. Without such
    steps the builtin base learns nothing: it is never right at first.
    """

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        prompt = str(row["prompt"])
        self._key = prompt[2:-1]
        self._value = str(row["answer"])
        self._found = False
        self._left = _TRIES
        return Observation(prompt)

    def step(self, turn: Turn) -> Observation:
        self._left -= 1
        said = turn.text.strip() if turn.finish == "stop" else "?"
        if self._found:
            expected = "".join(sorted(self._value))
            near = difflib.SequenceMatcher(None, said, expected).ratio()
            reward = _SOLVED - _FOUND if said == expected else _NEAR * near
            return Observation(None, reward, {"solved": float(said == expected)})
        self._found = said == self._key[::-1]
        asked = f"\nS:{self._value}=" if self._found else f"\nR:{self._key}="
        reward = _FOUND * self._found
        if not self._left:
            return Observation(None, reward, {"found": float(self._found), "solved": 0.0})
        return Observation(asked, reward, {"found": 1.0} if self._found else {})

    def close(self) -> None:
        """Free nothing: there is nothing to free."""
