"""Make one attempt of one run: `python -m lorad.driver ATTEMPT_DIR`. SIGTERM asks for a graceful stop at the
next step.

The exit codes stand in `lorad/driver/attempt/main.py`.
"""

import contextlib
import sys
from pathlib import Path

from lorad.startup import quick_imports

with quick_imports():
    from lorad.backends.setup import needs_base
    from lorad.box.paths import RunDir
    from lorad.driver.attempt.main import StopFlag, end_by, load_spec, run_attempt
    from lorad.driver.attempt.pool import connect
    from lorad.driver.driver import drive
    from lorad.driver.evals.problems import load_problems
    from lorad.driver.rewards import Rewarder
    from lorad.driver.session import Judges, Session, State
    from lorad.driver.user.functions import UserFunctions
    from lorad.envs.host import Hosts
    from lorad.envs.programs import ProgramHosts, is_program
    from lorad.envs.rendered import open_format
    from lorad.models.directory import resolve
    from lorad.models.facts import read_facts
    from lorad.protocol.driver_params import DriverParams
    from lorad.protocol.heartbeat import HEART
    from lorad.protocol.journal import EndFact, JournalWriter, read
    from lorad.rl.completions.targets import load_train
    from lorad.rl.streaming.pinned import pinned
    from lorad.rl.streaming.reader import newest_commit
    from lorad.rl.tokenizer import Tokenizer
    from lorad.spec.model import Spec, fitted


def main() -> int:
    return run_attempt(Path(sys.argv[1]), attempt)


def attempt(
    params: DriverParams, run_dir: RunDir, journal: JournalWriter, stop: StopFlag
) -> tuple[EndFact, int]:
    """Drive the run; return why it ended, and the last step that counts."""
    state = State()
    try:
        with contextlib.ExitStack() as stack:
            session = open_session(params, run_dir, journal, stop, stack)
            if session is None:
                return EndFact("stopped", "before its pool was ready"), 0
            session.state = state
            return drive(session), state.step
    except Exception as error:
        return end_by(error, journal, run_dir), state.step


def open_session(
    params: DriverParams, run_dir: RunDir, journal: JournalWriter, stop: StopFlag, stack: contextlib.ExitStack
) -> Session | None:
    """Open and check everything that a loop needs, waiting for the pool last; None when a stop came first."""
    HEART.work("begin")
    HEART.tell("reading the data")
    spec = load_spec(run_dir, params)
    cwd = Path(params.cwd)
    directory = resolve(spec.model.path, any_architecture=not needs_base(spec))
    spec = fitted(spec, read_facts(directory).max_positions)
    attempts = [record.data for record, _ in read(run_dir.journal) if record.kind == "attempt"]
    spec = pinned(spec, attempts[-1].get("commits", {}) if attempts else {}, newest_commit)
    tokenizer = Tokenizer(directory, date=params.date)
    HEART.progress()
    train_data = load_train(spec, tokenizer, cwd)
    HEART.progress()
    rewarder = stack.enter_context(Rewarder(spec.rewards, cwd))
    problems = load_problems(spec, tokenizer, cwd, rewarder, stack)
    tokenizer.close()  # all prompts are rendered
    own = stack.enter_context(UserFunctions(spec.algorithm, cwd, params.run))
    hosts = _open_hosts(spec, tokenizer, cwd, run_dir.root / "door", stack)
    of_sources = {}
    for number, (source, part) in enumerate(spec.of_sources.items()):
        judge = stack.enter_context(Rewarder(part.rewards, cwd))
        playing = _open_hosts(part, tokenizer, cwd, run_dir.root / f"door{number}", stack)
        of_sources[source] = Judges(part, judge, playing)
    HEART.tell("")  # the pool says how far it is
    pool = connect(params, stop)
    if pool is None:
        return None
    stack.enter_context(pool)
    data = (train_data, problems)
    return Session(
        spec, params, run_dir, pool, journal, tokenizer, *data, rewarder, own, hosts, stop, of_sources
    )


def _open_hosts(
    spec: Spec, tokenizer: Tokenizer, cwd: Path, door: Path, stack: contextlib.ExitStack
) -> Hosts | ProgramHosts | None:
    """Return what plays the episodes of a spec, if it has any. Raises SpecError."""
    if spec.env.name is None:
        return None
    format = open_format(spec, tokenizer)
    hosts: Hosts | ProgramHosts
    if is_program(spec.env, cwd):
        hosts = ProgramHosts(spec.env, cwd, format, door)
    else:
        hosts = Hosts(spec.env, cwd, format)
    stack.callback(hosts.close)
    return hosts


if __name__ == "__main__":
    sys.exit(main())
