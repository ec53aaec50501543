"""Does the requests of one model in their order, and writes each result before anybody reads it.

After a death the next attempt loads the newest checkpoint and does the later requests again. Results that
were written stay as they are: a request that has one is done again where it changes the model, and its result
is not written again; a request that failed is not tried again.
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
from lorad.tinker import records
from lorad.tinker.lane.model import Model
from lorad.tinker.lane.state import REQUESTS, RESULTS, EarlierResults, Inbox, State, shorten
from lorad.tinker.lane.work import Passes, backward_of, forward_of, result_of, step_of
from lorad.tinker.log import LogWriter

_MOST_SECONDS = 30.0  # of requests that a death would have done again
_OF_THE_CODE = "ValueError: "  # begins what a pool says of wrong arguments of a call


class Lane:
    """Drives one attempt."""

    def __init__(
        self, model: Model, pool: Connection, journal: JournalWriter, results: LogWriter, root: Path
    ) -> None:
        self._model = model
        self._pool = pool
        self._journal = journal
        self._results = results
        self._root = root
        self._earlier = EarlierResults()
        self._passes = Passes()
        self._steps_since = 0  # the last checkpoint
        self._seconds_since = 0.0  # the last checkpoint, of work
        self._end: EndFact | None = None
        self._repeated = 0  # requests that were done again

    def drive(self, state: State, stop: StopFlag, *, every: int, steps: int) -> EndFact:
        """Do requests until a stop, and park.

        Args:
            state: Becomes the model's state.
            every: Steps between two checkpoints.
            steps: The most steps there may be.
        """
        self._model.begin(state)
        self._earlier = EarlierResults.read(self._root / RESULTS, state.seq)
        inbox = Inbox(self._root / REQUESTS, state.seq)
        if (last := self._earlier.snapshot) > state.seq and not inbox.has_next():
            raise Conflict(
                f"requests {state.seq + 1} to {last} are gone: they were in a later checkpoint",
                hint="Resume from the newest checkpoint.",
            )
        while self._end is None and not stop.wanted:
            HEART.work("")
            if (request := inbox.next()) is not None:
                self._take(request, steps)
                is_long = self._seconds_since >= _MOST_SECONDS
                if self._steps_since and (self._steps_since >= every or is_long):
                    self._snapshot()
        self._snapshot()
        self._model.close()
        return self._end or EndFact("stopped", f"parked after {state.step} steps")

    def _take(self, request: records.Request, steps: int) -> None:
        """Do a request, or do it again, as far as it changes the model.

        Raises LoradError for a request that fails now and did not before.
        """
        work = request.arguments
        failed = self._earlier.failed.get(request.seq)
        HEART.work(type(work).__name__.lower())
        started = time.perf_counter()
        if failed is None:
            outcome = self._outcome(request, steps)
            self._results.append(records.Result(request.seq, time.time(), outcome))
        elif failed:
            self._note_failure(request, "it failed before")
        elif not isinstance(work, records.SaveWeights | records.SaveSampler | records.Pass) or (
            isinstance(work, records.Pass) and work.backward
        ):
            outcome = self._outcome(request, steps)
            if isinstance(outcome, records.Failed):
                raise LoradError(f"request {request.seq} was done before, and fails now: {outcome.message}")
            self._repeated += 1
        self._seconds_since += time.perf_counter() - started

    def _outcome(self, request: records.Request, steps: int) -> records.Outcome:
        """Do a request and return its result, also where it failed. Raises what the attempt ends by."""
        try:
            outcome = self._do(request, steps)
        except (PoolLost, Fenced):
            raise
        except LoradError as error:
            if error.message.startswith(_OF_THE_CODE):
                outcome = records.Failed(error.message.removeprefix(_OF_THE_CODE), "user")
            else:
                is_ours = isinstance(error, AttestationFailed | StorageError) or type(error) is LoradError
                words = f"{error.message}{'. ' * bool(error.hint)}{error.hint}"
                outcome = records.Failed(words, "server" if is_ours else "user")
        except ValueError as error:
            outcome = records.Failed(str(error), "user")
        if isinstance(outcome, records.Failed):
            self._note_failure(request, outcome.message)
        elif isinstance(request.arguments, records.Create | records.Load | records.Step | records.Unload):
            self._model.state.seq = request.seq
        return outcome

    def _note_failure(self, request: records.Request, message: str) -> None:
        """Poison the gradients where a failure leaves them incomplete; a failed step discards them."""
        work = request.arguments
        poisons = (
            (isinstance(work, records.Pass) and work.backward)
            or (isinstance(work, records.Refused) and work.poisons)
            or (isinstance(work, records.Load) and self._passes.datums > 0)
        )
        if isinstance(work, records.Create):
            self._end = EndFact("failed", f"the model could not be made: {message}")
        elif poisons:
            self._passes.poisoned = f"request {request.seq} failed: {message}"
        elif isinstance(work, records.Step):
            self._pool.call("discard_grads", Nothing())
            self._passes = Passes()
            self._model.state.seq = request.seq

    def _do(self, request: records.Request, steps: int) -> records.Outcome:
        match request.arguments:
            case records.Create() as work:
                self._model.create(work.source, optimizer=work.optimizer)
                return records.Created()
            case records.Load() as work:
                self._model.load(work.source, optimizer=work.optimizer)
                self._passes = Passes()
                self._seconds_since = _MOST_SECONDS  # the next step is saved
                return records.Loaded(work.path)
            case records.Pass() as work:
                if not work.backward:
                    scored: LogprobsResult = self._pool.call("logprobs", forward_of(work))
                    return result_of(work, scored.logprobs)
                gradients: Gradients = self._pool.call("forward_backward", backward_of(work))
                if gradients.logprobs is None:
                    raise LoradError("the trainer gave no log-probabilities")
                if tokens := gradients.halved_to:
                    message = (
                        f"the device had no memory for a micro-batch; they have {tokens} tokens from now on"
                    )
                    self._journal.append("warning", self._model.state.step, {"message": message})
                self._passes.add(work, gradients)
                return result_of(work, gradients.logprobs, gradients.loss)
            case records.Step() as work:
                return self._step(work, steps)
            case records.SaveWeights() as work:
                return self._model.save(request.seq, work)
            case records.SaveSampler() as work:
                return self._model.publish(work)
            case records.Unload():
                self._end = EndFact("completed", f"{self._model.state.step} steps, unloaded by its client")
                return records.Unloaded()
            case records.Refused() as work:
                return records.Failed(work.message)

    def _step(self, work: records.Step, steps: int) -> records.Outcome:
        state = self._model.state
        passes = self._passes
        if passes.poisoned:
            return records.Failed(
                f"this step was not done, and its gradients are discarded, as {passes.poisoned}"
            )
        if state.step >= steps:
            return records.Failed(f"the run has made its {steps} steps (trainer.steps)")
        done: StepDone = self._pool.call("optim_step", step_of(work))
        if not done.applied:
            return records.Failed(
                "the gradient is not finite: the step was not done, the gradients are discarded"
            )
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
        self._passes = Passes()
        self._steps_since += 1
        return records.Stepped({"grad_norm": done.grad_norm})

    def _snapshot(self) -> None:
        if self._repeated:
            print(f"{self._repeated} requests were done again", flush=True)
            self._repeated = 0
        HEART.work("checkpoint")
        if self._model.snapshot():
            state = self._model.state
            self._results.append(records.Result(state.seq, time.time(), records.Snapshot(state.step)))
            shorten(self._results, self._root, state.seq)
        self._steps_since = 0
        self._seconds_since = 0.0
