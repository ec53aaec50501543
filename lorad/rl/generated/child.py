"""Prints the rows of a reasoning-gym dataset as JSON lines; run as a file, where the package is.

    python -I child.py TASK ARGS        ARGS: JSON, the arguments of `reasoning_gym.create_dataset`

What is wrong comes as one line {"error": …, "hint": …} and exit code 3.
"""

import difflib
import json
import sys


def main() -> None:
    task = sys.argv[1]
    args = json.loads(sys.argv[2])
    try:
        import reasoning_gym  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        _refuse(
            f"reasoning_gym needs reasoning-gym, which {sys.executable} does not have",
            f"`{sys.executable} -m pip install reasoning-gym` installs it; or name an interpreter that "
            "has it in data.python.",
        )
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS)
        _refuse(f"reasoning_gym has no task {task}", f"Near it: {', '.join(near or sorted(DATASETS))}.")
    try:
        dataset = reasoning_gym.create_dataset(task, **args)
        for index in range(len(dataset)):
            entry = dataset[index]
            origin = {"task": task, "args": args, "index": index}
            row = {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": origin}
            row["metadata"] = entry["metadata"]
            print(json.dumps(row, default=str))
    except (AssertionError, TypeError, ValueError) as error:
        _refuse(f"reasoning_gym {task} refuses data.args: {error}", "See its settings in reasoning-gym.")


def _refuse(error: str, hint: str) -> None:
    print(json.dumps({"error": error, "hint": hint}))
    sys.exit(3)


if __name__ == "__main__":
    main()
