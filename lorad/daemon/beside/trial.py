"""`python -m lorad.daemon.beside.trial`: samples of a spec that is not queued; see `lorad/client/trial.py`.

A driver's session in a pool of its own, in a directory that is thrown away: the first rollout of the run that
it would be. A GPU is locked as a daemon locks it. All processes end with the guard of this one.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from lorad.startup import quick_imports

with quick_imports():
    import msgspec
    from msgspec.structs import replace

    from lorad.box.config import Config, load
    from lorad.box.machine import read_machine
    from lorad.box.paths import Home, RunDir, default_home
    from lorad.box.runtime import Overrides, choose_runtime
    from lorad.client.shapes import Sample
    from lorad.client.trial import Line, Question
    from lorad.daemon.gpu.devices import Device, find_devices, is_taken, lock_file
    from lorad.daemon.pool import names_of, setup_for
    from lorad.daemon.process.commands import Commands, secrets_of
    from lorad.daemon.runs.create import anchored
    from lorad.daemon.runs.preflight import answer
    from lorad.daemon.runs.rate import rated
    from lorad.driver.__main__ import open_session
    from lorad.driver.begin import begin
    from lorad.driver.rewards import Score
    from lorad.driver.sample import complete, sampling
    from lorad.driver.session import Plan, Session, StopFlag
    from lorad.driver.session import Sample as Made
    from lorad.envs.host import Host
    from lorad.envs.programs import ProgramHosts
    from lorad.envs.replay import differences
    from lorad.errors import Conflict, PoolLost, SpecError, to_wire
    from lorad.protocol import preflight
    from lorad.protocol.driver_params import DriverParams
    from lorad.protocol.journal import JournalWriter
    from lorad.protocol.pool_setup import PoolSetup
    from lorad.protocol.preflight import ErrorSaid, SpecFacts
    from lorad.protocol.structs import learn_structs
    from lorad.spec.model import Spec, convert, to_json

_NAME = "try"  # of the run that is none
_TAIL = 2000  # characters of the pool's log
Say = Callable[[Line], None]


def main() -> int:
    lines = os.dup(1)  # whatever user code prints goes to stderr
    os.dup2(2, 1)

    def say(line: Line) -> None:
        os.write(lines, msgspec.json.encode(line) + b"\n")

    try:
        learn_structs()
        question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
        say(_attempt(question, say))
    except Exception as error:
        if not isinstance(error, OSError) and to_wire(error)["kind"] == "internal":
            traceback.print_exc()
        say(Line(error=msgspec.convert(to_wire(error), ErrorSaid)))
    return 0


def _attempt(question: Question, say: Say) -> Line:
    """Check the spec, start a pool, make the samples, and play episodes again; returns the last line."""
    cwd, home, directory = Path(question.cwd), Home(default_home()), Path(question.directory)
    spec, config = anchored(convert(question.spec), cwd, None), load(home.config)
    if spec.algorithm.kind != "rl":
        raise SpecError(
            f"{spec.algorithm.name} trains on completions in the data, so that there is nothing to sample",
            key="algorithm",
            hint="`lorad try` is for specs whose model is sampled.",
        )
    os.environ.update(secrets_of(config))
    with contextlib.ExitStack() as stack:
        devices = stack.enter_context(_held(find_devices(config.devices.cpu_slots), spec))
        say(Line(progress="checking the spec"))
        spec, facts = rated(spec, _checked(spec, cwd, devices, home, config))
        for warning in facts.warnings:
            say(Line(progress=f"warning: {warning}"))
        spec = replace(spec, name=_NAME, eval=replace(spec.eval, every=0))
        where = ", ".join(device.name for device in devices)
        say(Line(progress=f"starting {spec.rollout.backend} for {spec.model.path} on {where}"))
        started = time.monotonic()
        stop = StopFlag()
        socket = stack.enter_context(_pool(spec, facts, config, devices, directory, cwd, stop))
        session = _session(spec, socket, directory, cwd, stop, stack)
        begin(session)
        start = spec.lora.adapter_path or "the base"
        what = "samples" if session.hosts is None else "episodes"
        took = time.monotonic() - started
        say(Line(progress=f"ready after {took:.1f} s; {question.count} {what} with {start}"))
        samples = _samples(session, question.count)
        for sample in samples:
            say(Line(sample=sample))
        if spec.env.name is None or isinstance(session.hosts, ProgramHosts):
            return Line(is_over=True)
        say(Line(progress="playing the same turns to fresh environments"))
        host = stack.enter_context(contextlib.closing(Host(spec.env, cwd)))
        return Line(differences=[*differences(host, samples)], is_over=True)


@contextlib.contextmanager
def _held(devices: list[Device], spec: Spec) -> Iterator[list[Device]]:
    """Lock the first neighbouring devices that are free; a CPU is always. Raises SpecError, Conflict."""
    if devices[0].is_cpu:
        yield devices[:1]
        return
    count = spec.gpus
    if count > len(devices):
        raise SpecError(
            f"it needs {count} GPUs, this machine has {len(devices)}",
            key="resources.gpus",
            hint="Ask for fewer.",
        )
    for first in range(len(devices) - count + 1):
        some = devices[first : first + count]
        if any(is_taken(device) for device in some):
            continue
        with contextlib.ExitStack() as stack:
            try:
                for device in some:
                    _lock(device, stack)
            except OSError:  # somebody was quicker
                continue
            yield some
            return
    hint = "`lorad devices` shows who has them; `lorad pools stop POOL` ends an idle pool."
    raise Conflict(f"no {count} neighbouring GPUs are free" if count > 1 else "no GPU is free", hint=hint)


def _lock(device: Device, stack: contextlib.ExitStack) -> None:
    """Raises OSError. The pool inherits the lock."""
    path = lock_file(device)
    assert path is not None
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    stack.callback(os.close, file)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.set_inheritable(file, True)


def _checked(spec: Spec, cwd: Path, devices: list[Device], home: Home, config: Config) -> SpecFacts:
    """Ask the process that checks specs. Raises what it raised."""
    question = preflight.Question(
        spec=msgspec.to_builtins(spec),
        cwd=str(cwd),
        device=devices[0].kind,
        devices=len(devices),
        loggers=config.loggers,
    )
    commands = Commands()
    found = subprocess.run(
        commands.preflight,
        input=msgspec.json.encode(question),
        capture_output=True,
        env={**os.environ, **commands.environment(home)},
        check=False,
    )
    return answer(found.stdout, found.stderr)


@contextlib.contextmanager
def _pool(
    spec: Spec,
    facts: SpecFacts,
    config: Config,
    devices: list[Device],
    directory: Path,
    cwd: Path,
    stop: StopFlag,
) -> Iterator[Path]:
    """A pool process, and the path of its socket; `stop` when it ends by itself. Raises PoolLost then."""
    overrides = Overrides(spec=spec.pool.threads, config=config.runtime, environment=os.environ)
    runtime = choose_runtime(facts.parameters, read_machine(), devices[0].kind, overrides)
    setup: PoolSetup = replace(
        setup_for(
            spec,
            config,
            *devices,
            model_path=facts.model_path,
            dtype=facts.model_dtype,
            threads=runtime.threads,
            facts=facts,
            cwd=str(cwd),
        ),
        pool=_NAME,
        devices=names_of(devices),
        socket=str(directory / "pool.sock"),
        owner=os.getuid(),
    )
    commands, log = Commands(), directory / "pool.log"
    path = os.open(directory / "pool.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(setup))
    added = commands.environment(Home(default_home()), runtime=runtime, pythonpath=setup.pythonpath)
    with log.open("wb") as file:
        locks = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_lock(fd)]
        process = subprocess.Popen(
            [*commands.pool, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **added},
            cwd=directory,
            pass_fds=locks,
        )

    def watch() -> None:
        process.wait()
        stop()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield Path(setup.socket)
    except PoolLost as lost:
        tail = log.read_text(errors="replace")[-_TAIL:].strip()
        raise PoolLost(f"{lost.message}\n{tail}", hint=lost.hint) from lost
    finally:
        process.terminate()


def _is_lock(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.get_inheritable(fd) and os.readlink(f"/proc/self/fd/{fd}").endswith(".lock")
    return False


def _session(
    spec: Spec, socket: Path, directory: Path, cwd: Path, stop: StopFlag, stack: contextlib.ExitStack
) -> Session:
    """Open a driver's session of a run that is none. Raises PoolLost."""
    run = RunDir(directory / _NAME)
    run.attempt(1).work.mkdir(parents=True)
    run.spec.write_bytes(to_json(spec))
    params = DriverParams(
        run=_NAME,
        run_dir=str(run.root),
        attempt=1,
        steps=spec.trainer.steps,
        pool=_NAME,
        pool_socket=str(socket),
        cwd=str(cwd),
    )
    journal = stack.enter_context(JournalWriter(run.journal, _NAME, 1))
    session = open_session(params, run, journal, stop, stack)
    if session is None:
        raise PoolLost("the pool ended before it answered", hint="The end of its log is above.")
    return session


def _samples(session: Session, count: int) -> list[Sample]:
    """Make one sample of each of the first rows."""
    wanted = Plan(0, session.train_data.take(0, count), 0, session.state.version, 0)
    groups, _, scoring = complete(session, session.pool, wanted, 1, sampling(session))
    made = [sample for group in groups for sample in group]
    return [_shape(one, score) for one, score in zip(made, scoring.scores(), strict=True)]


def _shape(made: Made, score: Score) -> Sample:
    episode = made.episode
    return Sample(
        step=0,
        version=made.version,
        prompt_id=made.example.id,
        index=made.index,
        prompt=made.example.prompt,
        completion=made.text,
        answer=made.example.answer,
        reward=score.value,
        finish=made.finish,
        error=score.error or None,
        rewards=dict(score.parts),
        task=episode.task if episode else None,
        turns=episode.turns if episode else [],
        end=episode.end if episode else None,
        rows=1 + len(made.forks),
    )


if __name__ == "__main__":
    sys.exit(main())
