"""What a user of the Python API writes: `make check` checks its types, and nobody runs it.

Each `type: ignore` is a mistake that has to be seen: one that is not is an unused ignore, which is an error.
"""

import lorad
from lorad.records.measured import Step
from lorad.records.runs import RunDetails
from lorad.records.versions import Completions, Version

box: lorad.Lorad = lorad.connect(home="/tmp/x", start=False)
run: lorad.Run = box.run({"data": {"train": "sort"}}, name="a", seed=3, trainer={"lr": 1e-4})
found: RunDetails = run.wait(until="eval>0.9", timeout=3.0)
steps: lorad.Table[Step] = run.steps
last: Step = steps[-1]
version: Version = run.versions[0]
made: Completions = box.generate(version, "x", n=2)
names: list[str] = [one.name for one in box.runs(state="failed")]

run.wait(until=3)  # type: ignore[arg-type]
run.wait(unitl="x")  # type: ignore[call-arg]
box.get(3)  # type: ignore[arg-type]
number: int = run.state  # type: ignore[assignment]


async def main() -> None:
    abox = await lorad.connect_async()
    one: lorad.AsyncRun = await abox.get("a")
    late: RunDetails = await one.wait(timeout=1)
    more: lorad.Table[Step] = await one.steps
    fork: lorad.AsyncRun = await one.fork(3, name="b", trainer={"lr": 1e-4})
    async for event in fork.events(after=-1):
        print(event.kind, late.step, more[-1].metrics)
    await one.wait(timeout="x")  # type: ignore[arg-type]
    await abox.get(3)  # type: ignore[arg-type]
    wrong: RunDetails = await one.steps  # type: ignore[assignment]
    print(wrong)
