"""`python -m lorad.driver ATTEMPT_DIR`: one attempt of one run. SIGTERM asks for a graceful stop at the next step.

Exit codes: 0 the attempt ended as it should (completed or stopped), 1 it failed, 74 even the journal could not be
written.
"""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path

from lorad.driver import params as parameters
from lorad.driver.begin import connect
from lorad.driver.driver import drive
from lorad.driver.params import Params
from lorad.driver.rewards import Rewarder
from lorad.driver.session import Session, load_spec
from lorad.errors import AttestationFailed, LoradError, PoolLost
from lorad.models.directory import resolve
from lorad.paths import RunDir
from lorad.protocol.journal import EndFact, JournalWriter
from lorad.rl.data import load_data
from lorad.rl.tokenizer import Tokenizer
from lorad.specs import Spec

JOURNAL_LOST = 74  # EX_IOERR


def main() -> int:
    params = parameters.read(Path(sys.argv[1]))
    run_dir = RunDir(Path(params.run_dir))
    step = [0]
    try:
        with JournalWriter(run_dir.journal, params.run, params.attempt) as journal:
            end = attempt(params, run_dir, journal, step)
            journal.append("end", step[0], end)
    except OSError as error:
        print(f"the journal cannot be written: {error}", file=sys.stderr, flush=True)
        return JOURNAL_LOST
    print(f"{end.reason}: {end.detail}", flush=True)
    return 0 if end.reason in ("completed", "stopped") else 1


def attempt(params: Params, run_dir: RunDir, journal: JournalWriter, step: list[int]) -> EndFact:
    """Drive, and say why it ended; `step` receives the last step that counts."""
    session: Session | None = None
    try:
        session = open_session(params, run_dir, journal)
        signal.signal(signal.SIGTERM, lambda *_: setattr(session, "stop_requested", True))
        return drive(session)
    except AttestationFailed as error:
        return EndFact("attestation_failed", error.message, error.hint)
    except PoolLost as error:
        return EndFact("lost", error.message, error.hint or f"`lorad resume {params.run}` goes on from a checkpoint.")
    except LoradError as error:
        return EndFact("failed", error.message, error.hint)
    except OSError as error:
        hint = f"Free some space or mend the permissions, then `lorad resume {params.run}`."
        return EndFact("failed", f"{error.filename or run_dir.root}: {error.strerror}", hint)
    except Exception as error:
        traceback.print_exc()
        return EndFact("failed", f"{type(error).__name__}: {error}", f"See `lorad logs {params.run}`.")
    finally:
        if session is not None:
            step[0] = session.state.step
            session.rewarder.close()
            session.pool.close()


def open_session(params: Params, run_dir: RunDir, journal: JournalWriter) -> Session:
    """Everything that a loop needs, checked; the pool is waited for last."""
    spec, cwd = load_spec(run_dir), Path(params.cwd)
    tokenizer = Tokenizer(resolve(spec.model.path))
    train_data = load_data(spec.data.train, "train", spec.data, tokenizer, spec.seed, cwd)
    eval_data = eval_problems(spec, tokenizer, cwd)
    rewarder = Rewarder(spec.reward_spec, cwd)
    pool = connect(Path(params.pool_socket), params.run, params.attempt, params.pool_timeout)
    return Session(spec, params, run_dir, pool, journal, tokenizer, train_data, eval_data, rewarder)
