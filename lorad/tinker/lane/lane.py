"""One model: requests in their order, each done and its result written before anybody is told.

After a death the next attempt loads the newest checkpoint and does again what came after it. What was told
stays as it was told: a request that has a result is done again where it changes the model, and its result is
not written again; one that failed is not tried again.
"""

import time
from pathlib import Path

from lorad.driver.attempt.main import StopFlag
from lorad.errors import AttestationFailed, Conflict, Fenced, LoradError, PoolLost, StorageError
from lorad.protocol.batch import Gradients
from lorad.protocol.calls import LogprobsResult, Nothing
from lorad.protocol.calls import Stepped as StepDone
from lorad.protocol.connection import Connection
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import EndFact, JournalWriter, StepFact
from lorad.tinker.lane.model import Model
from lorad.tinker.lane.state import REQUESTS, RESULTS, Inbox, State, Told, shorten
from lorad.tinker.lane.work import Passes, backward_of, forward_of, passed, step_of
from lorad.tinker.log import LogWriter
from lorad.tinker.records import (
    Arguments,
    Category,
    Create,
    Created,
    Failed,
    Load,
    Loaded,
    Outcome,
    Pass,
    Passed,
    Refused,
    Request,
    Result,
    SaveSampler,
    SaveWeights,
    Snapshot,
    Step,
    Stepped,
    Unload,
    Unloaded,
)

_MOST_SECONDS = 30.0  # of requests that a death would have done again
_OF_THE_CODE = "ValueError: "  # of what a pool found wrong with the arguments of a call


class Lane:
    """One attempt. every: steps between two checkpoints. steps: the most there may be."""

    def __init__(
        self, model: Model, pool: Connection, journal: JournalWriter, results: LogWriter, root: Path
    ) -> None:
        self._model, self._pool, self._journal, self._results = model, pool, journal, results
        self._root, self._told = root, Told()
        self._passes = Passes.none()
        self._since, self._seconds = 0, 0.0  # steps and seconds of work since the last checkpoint
        self._end: EndFact | None = None
        self._again = 0

    def drive(self, state: State, stop: StopFlag, *, every: int, steps: int) -> EndFact:
        """Do requests until a stop, and park. state: becomes that of the model."""
        self._model.begin(state)
        self._told = Told.in_log(self._root / RESULTS, state.seq)
        inbox = Inbox(self._root / REQUESTS, state.seq)
        if self._told.kept > state.seq and not inbox.has_next():
            raise Conflict(
                f"requests {state.seq + 1} to {self._told.kept} are gone: they were in a later checkpoint",
                hint="Resume from the newest checkpoint.",
            )
        while self._end is None and not stop.wanted:
            HEART.work("")
            if (request := inbox.next()) is not None:
                self._turn(request, steps)
                self._keep(every)
        self._snapshot()
        self._model.close()
        return self._end or EndFact("stopped", f"parked after {state.step} steps")

    def _turn(self, request: Request, steps: int) -> None:
        """Do a request, or do it again, as far as it changes the model."""
        work, failed = request.arguments, self._told.failed.get(request.seq)
        HEART.work(type(work).__name__.lower())
        started = time.perf_counter()
        if failed is None:
            outcome = self._outcome(request, steps)
            self._results.append(Result(request.seq, time.time(), outcome))
        elif failed:
            self._note_failure(request, "it failed before")
        elif not isinstance(work, SaveWeights | SaveSampler | Pass) or (
            isinstance(work, Pass) and work.backward
        ):
            self._do_again(request, steps)
        self._seconds += time.perf_counter() - started

    def _outcome(self, request: Request, steps: int) -> Outcome:
        """Return the result, Failed among them. Raises what the attempt ends by."""
        work = request.arguments
        try:
            outcome = self._done(request, steps)
        except (PoolLost, Fenced):
            raise
        except (LoradError, ValueError) as error:
            outcome = _failed(error)
        if isinstance(outcome, Failed):
            self._note_failure(request, outcome.message)
        elif isinstance(work, Create | Load | Step | Unload):
            self._model.state.seq = request.seq
        return outcome

    def _note_failure(self, request: Request, message: str) -> None:
        work = request.arguments
        if isinstance(work, Create):
            self._end = EndFact("failed", f"the model could not be made: {message}")
        elif self._spoils(work):
            self._passes.poisoned = f"request {request.seq} failed: {message}"
        elif isinstance(work, Step):
            self._pool.call("discard_grads", Nothing())
            self._passes = Passes.none()
            self._model.state.seq = request.seq

    def _spoils(self, work: Arguments) -> bool:
        """Return whether its failure leaves other gradients than were asked for; a load leaves none."""
        match work:
            case Pass():
                return work.backward
            case Refused():
                return work.poisons
            case _:
                return isinstance(work, Load) and self._passes.datums > 0

    def _do_again(self, request: Request, steps: int) -> None:
        """Raises LoradError for what fails now and did not before."""
        outcome = self._outcome(request, steps)
        if isinstance(outcome, Failed):
            raise LoradError(f"request {request.seq} was done before, and fails now: {outcome.message}")
        self._again += 1

    def _done(self, request: Request, steps: int) -> Outcome:
        match request.arguments:
            case Create() as work:
                self._model.create(work.source, optimizer=work.optimizer)
                return Created()
            case Load() as work:
                self._model.load(work.source, optimizer=work.optimizer)
                self._passes, self._seconds = Passes.none(), _MOST_SECONDS  # the next step is saved
                return Loaded(work.path)
            case Pass() as work:
                return self._pass(work)
            case Step() as work:
                return self._step(work, steps)
            case SaveWeights() as work:
                return self._model.save(request.seq, work)
            case SaveSampler() as work:
                return self._model.publish(work)
            case Unload():
                self._end = EndFact("completed", f"{self._model.state.step} steps, unloaded by its client")
                return Unloaded()
            case Refused() as work:
                return Failed(work.message)

    def _pass(self, work: Pass) -> Passed:
        if not work.backward:
            scored: LogprobsResult = self._pool.call("logprobs", forward_of(work))
            return passed(work, scored.logprobs)
        found: Gradients = self._pool.call("forward_backward", backward_of(work))
        if found.logprobs is None:
            raise LoradError("the trainer gave no log-probabilities")
        if found.halved_to:
            told = (
                f"the device had no memory for a micro-batch; they have {found.halved_to} tokens from now on"
            )
            self._journal.append("warning", self._model.state.step, {"message": told})
        self._passes.add(work, found)
        return passed(work, found.logprobs, found.loss)

    def _step(self, work: Step, steps: int) -> Outcome:
        state, passes = self._model.state, self._passes
        if passes.poisoned:
            return Failed(f"this step was not done, and its gradients are discarded, as {passes.poisoned}")
        if state.step >= steps:
            return Failed(f"the run has made its {steps} steps (trainer.steps)")
        done: StepDone = self._pool.call("optim_step", step_of(work))
        if not done.applied:
            return Failed("the gradient is not finite: the step was not done, the gradients are discarded")
        state.step += 1
        metrics = passes.metrics(work, done)
        if state.step > self._model.journaled:
            fact = StepFact(
                version=state.version,
                prompts=[],
                position=state.position,
                samples="",
                samples_sha256="",
                metrics=metrics,
                consumed=passes.datums,
            )
            self._journal.append("step", state.step, fact)
        state.position += passes.datums
        self._passes = Passes.none()
        self._since += 1
        return Stepped({"grad_norm": done.grad_norm})

    def _keep(self, every: int) -> None:
        """Checkpoint the last step, where that is due."""
        if self._since and (self._since >= every or self._seconds >= _MOST_SECONDS):
            self._snapshot()

    def _snapshot(self) -> None:
        if self._again:
            print(f"{self._again} requests were done again", flush=True)
            self._again = 0
        HEART.work("checkpoint")
        if self._model.snapshot():
            state = self._model.state
            self._results.append(Result(state.seq, time.time(), Snapshot(state.step)))
            shorten(self._results, self._root, state.seq)
        self._since, self._seconds = 0, 0.0


def _failed(error: Exception) -> Failed:
    """Return the result of a request that raised."""
    if not isinstance(error, LoradError):
        return Failed(str(error), "user")
    if error.message.startswith(_OF_THE_CODE):
        return Failed(error.message.removeprefix(_OF_THE_CODE), "user")
    kind: Category = "server" if isinstance(error, AttestationFailed | StorageError) else "user"
    if type(error) is LoradError:
        kind = "server"
    return Failed(f"{error.message}{'. ' * bool(error.hint)}{error.hint}", kind)
