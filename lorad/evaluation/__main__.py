"""Read a Wanted on stdin and print an Evaluated, see `lorad.protocol.evals`, or a Grading and a Graded, see
`lorad.client.evaluate`.

    python -m lorad.evaluation

What user code prints meanwhile goes to stderr. The exit code is 0, or 130 after an interrupt.
"""

import contextlib
import os
import sys
import traceback

from lorad.startup import quick_imports

with quick_imports():
    import msgspec

    from lorad.client.evaluate import Graded, Grading
    from lorad.errors import to_wire
    from lorad.evaluation.evaluate import evaluate
    from lorad.evaluation.grade import grade
    from lorad.evaluation.suites import run_suite
    from lorad.protocol.evals import Evaluated, Wanted
    from lorad.protocol.preflight import ErrorSaid


def main() -> int:
    answers = os.dup(1)  # user code is imported here: whatever it and what it starts print goes to stderr
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Wanted | Grading)
            answer: Evaluated | Graded
            if isinstance(request, Grading):
                answer = grade(request)
            else:
                answer = evaluate(request) if request.suite is None else run_suite(request, request.suite)
        except KeyboardInterrupt:  # the command that asked has it, too
            return 130
        except Exception as error:
            if not hasattr(error, "hint"):
                traceback.print_exc()
            answer = Evaluated(error=msgspec.convert(to_wire(error), ErrorSaid))
    with open(answers, "wb") as file:
        file.write(b"\n" + msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
