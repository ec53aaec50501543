"""The conformance suites of engine and trainer on the device, and decode steps as graphs against a CPU's."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu_day.stage import Place, play
from tests.kit.world import REPOSITORY

_SUITE = "tests/test_on_a_gpu.py"
# of what `make test` runs on a CPU anyway
_ON_A_CPU = "TestEngine and not (schema or flight or swaps or abort) or captured or bfloat16"


def parity(place: Place) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        plugins = (
            "-p",
            "no:cacheprovider",
            "-p",
            "pytest_asyncio.plugin",
        )  # and none that a machine has by chance
        command = [sys.executable, "-m", "pytest", "-q", *plugins, f"--junitxml={results}"]
        chosen = [] if place.has_gpu else ["-k", _ON_A_CPU]
        done = subprocess.run(
            [*command, _SUITE, *chosen],
            cwd=REPOSITORY,
            env=os.environ | {"LORAD_TEST_DEVICE": place.device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            check=False,
        )
        if not results.exists():
            raise SystemExit(f"pytest ended with {done.returncode} before it had any result")
        suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    wrong = count["failures"] + count["errors"]
    place.say("passed", count["tests"] - wrong - count["skipped"])
    place.say("failed", wrong)
    place.say("skipped", count["skipped"])
    if done.returncode or count["tests"] == count["skipped"]:
        raise SystemExit(f"{wrong} of {count['tests']} tests failed, {count['skipped']} were skipped")


if __name__ == "__main__":
    play(parity)
