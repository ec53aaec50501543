"""Evaluate or grade by the request on stdin, and print the answer: `python -m lorad.evaluation`.

Requests and answers are in `lorad.protocol.evals` and `lorad.client.evaluate`. What user code prints goes
to stderr. The exit code is 0, or 130 after an interrupt.
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
    from lorad.protocol.preflight import ErrorFacts


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
            answer = Evaluated(error=msgspec.convert(to_wire(error), ErrorFacts))
    with open(answers, "wb") as file:
        file.write(b"\n" + msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
