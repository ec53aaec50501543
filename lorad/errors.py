"""Every error that a user can cause, as one tree.

LoradError                 what was wrong, where, and (hint) what to do next
 ├── SpecError             a spec, an override or a file that it names is not usable      exit 2
 ├── NotFound              no such run, version, checkpoint, alias                        exit 3
 ├── NotAllowed            the caller may not do this                                     exit 4
 ├── DaemonUnreachable     no daemon answers on the socket                                exit 5
 │    └── HostUnreachable  ssh does not reach the box that a command is about           exit 5
 ├── Conflict              the request does not fit the present state                     exit 1
 ├── IntegrityError        bytes on disk are not what their manifest says                 exit 1
 ├── StorageError          the disk does not take what has to be written                  exit 1
 ├── AdapterRefused        an adapter that an engine or trainer must not load             exit 1
 ├── AttestationFailed     the engine does not serve the version that it should           exit 1
 ├── PoolLost              the pool of a run is gone                                      exit 1
 ├── EngineGone            the engine died amid a call and comes back by itself           exit 1
 ├── Fenced                a call of an attempt that is not the current one               exit 1
 ├── RunFailed             a run that somebody waits for did not end well                 exit 1
 ├── NotReached            it ended well, without what was waited for                     exit 1
 └── TimedOut              it is not over in time; nothing was changed                    exit 1
"""

from collections.abc import Sequence
from typing import Any


class LoradError(Exception):
    """An error that says what was wrong and where; `hint` says what to do, `others` what else is wrong."""

    exit_code = 1
    status = 500

    def __init__(self, message: str, *, hint: str = "", others: "Sequence[LoradError]" = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.others = tuple(others)
        if hint:
            self.add_note(hint)  # a traceback shows it

    @property
    def in_full(self) -> str:
        """Return what was wrong, and what to do next, as sentences."""
        if not self.hint:
            return self.message
        return f"{self.message}{'' if self.message.endswith(('.', '?', '!')) else '.'} {self.hint}"


class SpecError(LoradError):
    """A spec, an override or a file that it names is not usable.

    The message is `where: path: problem`, without what is empty.
    where: the line or the override that holds the key.
    path: the dotted key to blame, with an index where one element is wrong (`lora.target_modules[0]`).
    problem: what is wrong.
    """

    exit_code = 2
    status = 422

    def __init__(
        self,
        problem: str,
        *,
        key: str = "",
        where: str = "",
        hint: str = "",
        others: Sequence[LoradError] = (),
    ) -> None:
        super().__init__(": ".join(filter(None, (where, key, problem))), hint=hint, others=others)
        self.where = where
        self.path = key
        self.problem = problem

    @property
    def key(self) -> str:
        """The dotted key to blame; empty where none is."""
        return self.path.partition("[")[0]

    def at(self, where: str) -> "SpecError":
        """Return the same error with the line or the override that holds the key."""
        return SpecError(self.problem, key=self.path, where=where, hint=self.hint, others=self.others)


class NotFound(LoradError):
    """No such run, version, checkpoint or alias."""

    exit_code = 3
    status = 404


class NotAllowed(LoradError):
    """The caller may not do this."""

    exit_code = 4
    status = 403


class DaemonUnreachable(LoradError):
    """No daemon answers on the socket."""

    exit_code = 5
    status = 503


class HostUnreachable(DaemonUnreachable):
    """The box that a command is about is not reached by ssh, or lorad does not answer there."""


class Conflict(LoradError):
    """The request does not fit the present state."""

    status = 409


class IntegrityError(LoradError):
    """Bytes on disk are not what their manifest says."""


class StorageError(LoradError):
    """The disk does not take what has to be written: full, over quota, not writable, or the place is gone."""

    status = 507


class AdapterRefused(LoradError):
    """An adapter that an engine or trainer must not load; nothing was changed."""

    status = 422


class AttestationFailed(LoradError):
    """The engine does not serve the version that it should."""


class PoolLost(LoradError):
    """The pool of a run is gone; the run can be resumed."""

    status = 503


class EngineGone(LoradError):
    """The engine died amid a call, which changed nothing; it comes back by itself."""

    status = 503


class Fenced(LoradError):
    """A call of an attempt that is not the current one of its run."""

    status = 409


class RunFailed(LoradError):
    """A run that somebody waits for ended otherwise than completed or stopped.

    run: its name.
    reason: one of `lorad.states.EndReason`.
    detail: why, in words.
    step: how far it came.
    """

    def __init__(self, run: str, reason: str, detail: str = "", *, step: int = 0, hint: str = "") -> None:
        super().__init__(f"{run} ended ({reason}) at step {step}{detail and ': '}{detail}", hint=hint)
        self.run = run
        self.reason = reason
        self.detail = detail
        self.step = step


class NotReached(LoradError):
    """A run is over, and what was waited for has not happened."""


class TimedOut(LoradError, TimeoutError):
    """What was waited for has not happened in time; nothing was changed."""


_KINDS: dict[str, type[LoradError]] = {
    kind.__name__: kind
    for kind in (
        *(LoradError, SpecError, NotFound, NotAllowed, DaemonUnreachable, Conflict, IntegrityError),
        *(StorageError, AdapterRefused, AttestationFailed, PoolLost, EngineGone, Fenced),
    )
}


def to_wire(error: BaseException) -> dict[str, Any]:
    """Write an error as it travels over a socket: {kind, message, hint}.

    A SpecError that blames a key has {where, key, problem} too; an error with others has {others: [error]}.
    What is no text in UTF-8, as bytes of a header that it repeats, has escapes.
    """
    words = {"kind": "LoradError", "message": f"{type(error).__name__}: {error}", "hint": ""}
    others: list[dict[str, Any]] = []
    if isinstance(error, LoradError):
        words = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
        others = [to_wire(other) for other in error.others]
    if isinstance(error, SpecError) and error.path:
        words |= {"where": error.where, "key": error.path, "problem": error.problem}
    escaped = {key: text.encode("utf-8", "backslashreplace").decode() for key, text in words.items()}
    return escaped | ({"others": others} if others else {})


def from_wire(data: dict[str, Any]) -> LoradError:
    """Make the error that `to_wire` has written; one of an unknown kind becomes a plain LoradError."""
    others = [from_wire(other | {"others": []}) for other in data.get("others", [])]
    kind = _KINDS.get(data.get("kind", ""), LoradError)
    if kind is SpecError and data.get("key"):
        about = {"where": data.get("where", ""), "key": data["key"], "hint": data.get("hint", "")}
        return SpecError(data.get("problem", ""), others=others, **about)
    return kind(data.get("message", ""), hint=data.get("hint", ""), others=others)
