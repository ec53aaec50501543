"""Sample and score N prompts, or play N episodes, and train nothing.

`python -m lorad.driver.trial ATTEMPT_DIR N` prints TrialEvents, one JSON line each; the exit code is 0. The
directory of the attempt is like that of a run. What is printed otherwise goes to stderr.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from lorad.startup import quick_imports

with quick_imports():
    import msgspec

    from lorad.box.paths import RunDir
    from lorad.driver.__main__ import open_session
    from lorad.driver.attempt.main import StopFlag
    from lorad.driver.begin import begin
    from lorad.driver.record import line_of
    from lorad.driver.sample import complete, sampling
    from lorad.driver.sampling.generate import SampleJob
    from lorad.driver.session import Plan, Session
    from lorad.errors import LoradError, to_wire
    from lorad.protocol.calls import Nothing
    from lorad.protocol.driver_params import read_params
    from lorad.protocol.journal import JournalWriter
    from lorad.protocol.preflight import ErrorFacts
    from lorad.protocol.structs import learn_structs
    from lorad.records.samples import Sample as SampleShape
    from lorad.records.samples import TrialEvent

_Say = Callable[[TrialEvent], None]


def main() -> int:
    with os.fdopen(os.dup(1), "wb") as events:
        os.dup2(2, 1)

        def say(event: TrialEvent) -> None:
            events.write(msgspec.json.encode(event) + b"\n")
            events.flush()

        learn_structs()
        try:
            n = int(sys.argv[2])
            params = read_params(Path(sys.argv[1]))
            run_dir = RunDir(Path(params.run_dir))
            with contextlib.ExitStack() as stack:
                journal = stack.enter_context(JournalWriter(run_dir.journal, params.run, params.attempt))
                session = open_session(params, run_dir, journal, StopFlag(), stack)
                assert session is not None  # nothing stops it
                begin(session)
                activity = "prompts are sampled" if session.hosts is None else "episodes are played"
                start = session.spec.lora.adapter_path or session.spec.model.path
                say(TrialEvent("phase", f"{n} {activity} with {start}"))
                seconds = _sampled(session, n, say)
                session.pool.call("close", Nothing())
                say(TrialEvent("end", seconds=seconds))
        except Exception as error:
            if not isinstance(error, LoradError):
                traceback.print_exception(error)
            say(TrialEvent("end", error=msgspec.convert(to_wire(error), ErrorFacts)))
    return 0


def _sampled(session: Session, n: int, say: _Say) -> float:
    """Say each sample with its score; returns the seconds that the pool took."""
    version = session.state.version
    planned = Plan(0, session.train_data.take(0, n), 0, version, 0)
    job = SampleJob(planned, 1, sampling(session), session.spec.seed)
    groups, generated, scoring = complete(session, session.pool, job)
    samples = [sample for group in groups for sample in group]
    for sample, score in zip(samples, scoring.scores(), strict=True):
        shape = SampleShape(
            step=0,
            **line_of(sample, score),
            tokens=sample.tokens.tolist(),
            logprobs=sample.logprobs.tolist(),
            rows=1 + len(sample.forks),
            forks=[*sample.forks],
        )
        say(TrialEvent("sample", sample=shape))
    return generated.seconds


if __name__ == "__main__":
    sys.exit(main())
