"""The user's own advantage and loss, each in a process that can be killed."""

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from msgspec.structs import asdict

from lorad.children.user_process import Lost, UserProcess, code_of, environment
from lorad.children.user_serve import Ready
from lorad.driver.user.algorithm_child import (
    AlgorithmAnswer,
    AlgorithmFunction,
    AlgorithmQuestion,
    Kind,
    array_of,
    plain_of,
)
from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.rl.user.functions import AdvantageInput, LossInput, sample_of
from lorad.spec.algorithm import Algorithm


class UserFunction:
    """A function that `algorithm.advantage` or `algorithm.loss` names. `close` leaves nothing of it running.

    Its errors end the run: unlike a reward, it is for all samples at once.
    """

    def __init__(self, kind: Kind, algorithm: Algorithm, cwd: Path, run: str = "") -> None:
        """Read the file; a relative path starts at `cwd`. Raises SpecError without such a file.

        run: the name of the run that calls it; "" in a check.
        """
        self._run = run
        self.key = f"algorithm.{kind}"
        limits = algorithm.user_code
        code = code_of(str(getattr(algorithm, kind)), cwd, self.key, limits.memory_bytes)
        more = {"kind": kind, "memory_key": "algorithm.user_code.memory"}
        self._setup = AlgorithmFunction(**asdict(code) | more)
        self.file = Path(code.file)
        self.source = code.source  # what runs, whatever becomes of the file
        self._timeout = limits.timeout
        self._environment = environment(os.environ, limits.env)
        self._child: UserProcess | None = None
        self._is_checked = False

    def start(self) -> None:
        """Load the function now. Raises SpecError when it cannot be loaded."""
        self.close()
        kind = self._setup.kind
        self._child = UserProcess("lorad.driver.user.algorithm_child", kind, self._environment)
        with HEART.waits():
            self._child.load(self._setup, self.key, Ready)

    def advantages(self, samples: AdvantageInput) -> np.ndarray:
        """Return the function's advantages, float64 [S] or [T]. Raises SpecError."""
        array = self._ask(AlgorithmQuestion(advantage=samples)).array
        if array is None or array.size not in (samples.rewards.size, samples.sampler.size):
            raise self._error("its process answered with an array of another size")
        return array

    def derivatives(self, samples: LossInput, seed: int) -> tuple[float | None, np.ndarray]:
        """Return the loss, if it has a value, and its derivative by each log-probability, float64 [T].

        The first derivative is checked, with the seed of `check_derivative`. Raises SpecError.
        """
        answer = self._ask(AlgorithmQuestion(loss=samples, checks=None if self._is_checked else seed))
        if answer.array is None or answer.array.size != samples.logprobs.size:
            raise self._error("its process answered with an array of another size")
        self._is_checked = True
        return answer.value, answer.array

    def try_out(self, *, with_reference: bool) -> None:
        """Call it with a few made-up samples. Raises SpecError."""
        samples = sample_of(self._setup.kind, with_reference=with_reference)
        if isinstance(samples, LossInput):
            self.derivatives(samples, seed=0)
        else:
            self.advantages(samples)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _ask(self, question: AlgorithmQuestion) -> AlgorithmAnswer:
        if self._child is None or not self._child.alive:
            self.start()
        assert self._child is not None
        try:
            with HEART.waits():
                answer = self._child.ask(
                    question, AlgorithmAnswer, self._timeout, enc_hook=plain_of, dec_hook=array_of
                )
        except Lost as lost:
            self.close()
            limit = " (algorithm.user_code.timeout)" * str(lost).startswith("no result")
            raise self._error(f"{self._setup.function} of {self.file}: {lost}{limit}") from None
        if answer.error:
            self.close()
            raise self._error(answer.error, answer.hint)
        return answer

    def _error(self, problem: str, hint: str = "") -> SpecError:
        mend = hint or f"Mend {self._setup.function} of {self.file}."
        then = f" Then `lorad resume {self._run}` continues from the last checkpoint." * bool(self._run)
        return SpecError(problem, key=self.key, hint=mend + then)


class UserFunctions(AbstractContextManager["UserFunctions", None]):
    """The user's functions that the spec names; closed at the end of the context."""

    def __init__(self, algorithm: Algorithm, cwd: Path, run: str = "") -> None:
        """Raises SpecError without such files."""
        self.advantage = UserFunction("advantage", algorithm, cwd, run) if algorithm.advantage else None
        self.loss = UserFunction("loss", algorithm, cwd, run) if algorithm.loss else None

    @property
    def all(self) -> list[UserFunction]:
        return [function for function in (self.advantage, self.loss) if function is not None]

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as stack:
            for function in self.all:
                stack.callback(function.close)
