"""The processor time of each test file, with every process that its tests start.

`make test ARGS="-p tests.kit.suite.cpu_seconds"` prints the dearest files at the end, and writes a line for
each test to the file that `LORAD_CPU_SECONDS` names. Each worker is in a control group of its own: this needs
root, and cgroup v1's cpuacct or cgroup v2.
"""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.warm.client import GROUP

FILE = "LORAD_CPU_SECONDS"
SHOWN = 40
V1, V2 = Path("/sys/fs/cgroup/cpuacct"), (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


class Group:
    """A control group with this process in it."""

    def __init__(self) -> None:
        root = V1 if V1.is_dir() else next(path for path in V2 if (path / "cgroup.controllers").exists())
        self.path = root / f"lorad-tests-{os.getpid()}"
        self.path.mkdir()
        (self.path / "cgroup.procs").write_text(str(os.getpid()))
        os.environ[GROUP] = str(self.path)

    def seconds(self) -> float:
        if (usage := self.path / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e9
        words = (self.path / "cpu.stat").read_text().split()
        return int(words[words.index("usage_usec") + 1]) / 1e6


class Meter:
    """Writes down what each test took."""

    def __init__(self) -> None:
        self.group = Group()

    def pytest_collection_finish(self) -> None:
        self.write("(collection)", self.group.seconds())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self.group.seconds()
        try:
            return (yield)
        finally:
            self.write(item.nodeid, self.group.seconds() - before)

    def write(self, test: str, seconds: float) -> None:
        with open(os.environ[FILE], "a") as file:
            file.write(json.dumps({"test": test, "seconds": round(seconds, 4), "at": time.time()}) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter())
    if FILE not in os.environ:
        os.environ[FILE] = tempfile.mkstemp(prefix="lorad-cpu-")[1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    by_file, tests = Counter[str](), Counter[str]()
    for line in Path(os.environ[FILE]).read_text().splitlines():
        row = json.loads(line)
        name = row["test"].partition("::")[0]
        by_file[name] += row["seconds"]
        tests[name] += 1
    terminalreporter.section(f"processor time: {sum(by_file.values()):.0f} s, {os.environ[FILE]}")
    for name, seconds in by_file.most_common(SHOWN):
        terminalreporter.write_line(f"{seconds:8.1f} s  {tests[name]:4} tests  {name}")
