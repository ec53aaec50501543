"""What a pool says of itself, as lines and as rows: figures that it does not report are left out."""

from collections.abc import Sequence

from msgspec import Struct
from rich.text import Text

from lorad.records.pools import Pool
from lorad.records.runs import Run
from lorad.records.versions import ServedAlias
from lorad.text import duration, one_line, size
from lorad.tui.dashboard.one_liners import speed
from lorad.tui.widgets.columns import TableColumn, TableRow, row_of

COLUMNS = (
    TableColumn("run", 8, 40, 0, orders=True, shrinks=16),
    TableColumn("turn", 6, 20, 0, orders=True),
    TableColumn("waited", 6, 8, 1, right=True, orders=True),
    TableColumn("loaded", 6, 24, 2),
    TableColumn("alias", 5, 20, 3),
    TableColumn("slot", 8, 10, 4, right=True, orders=True),
    TableColumn("owner", 5, 14, 5, orders=True),
    TableColumn("why", 10, 80, 6, rest=True),
)


class Seen(Struct, frozen=True):
    """A pool at a moment, None when it is not up any more; the runs that are in it, and those that wait."""

    pool: Pool | None
    runs: Sequence[Run] = ()
    waiting: Sequence[Run] = ()
    aliases: Sequence[ServedAlias] = ()


def lines(pool: Pool, waiting: int) -> Text:
    """Describe the pool: what it is, its engine, its trainer, and memory by part."""
    about = [pool.state, pool.model, pool.mode, " ".join(pool.devices or [pool.device])]
    about += [f"pid {pool.pid}"] if pool.pid else []
    about += [f"{pool.threads} threads"] if pool.threads else []
    about += [f"idle for {duration(pool.idle_seconds)}"] if pool.idle_seconds >= 1 else []
    about += [f"{waiting} waiting for it"] if waiting else []
    engine = pool.engine
    trainer = pool.trainer
    samples = [" ".join(filter(None, (engine.name, engine.software or "")))]
    if isinstance(engine.alive, bool):
        samples += [
            "GONE" if not engine.alive else "asleep" if engine.asleep else "awake",
            f"queue: {engine.running or 0} decoding, {engine.waiting or 0} waiting",
        ]
        if isinstance(engine.slots, int):
            samples.append(f"{engine.slots_used or 0}/{engine.slots} versions")
        if isinstance(engine.prefix_hits, float):
            samples.append(f"prompt cache: {engine.prefix_hits:.0%} hits")
        if isinstance(engine.cache_used, float):
            samples.append(f"{engine.cache_used:.0%} full")
        if isinstance(engine.adapters_per_step, float):
            samples.append(f"{engine.adapters_per_step:g} versions a step")
        samples += [f"{speed(pool.engine_tokens_per_second)} tok/s", engine.detail or ""]
    trains = [trainer.name]
    if isinstance(trainer.alive, bool):
        trains += [] if trainer.alive else ["GONE"]
        trains += ["its base is in host memory"] if trainer.here is False else []
        trains += [f"{speed(pool.trainer_tokens_per_second)} tok/s", trainer.detail or ""]
    memory = list[str]()
    if isinstance(trainer.memory, int):
        peak = f" (peak {size(trainer.memory_peak)})" if isinstance(trainer.memory_peak, int) else ""
        memory.append(f"trainer {size(trainer.memory)}{peak}")
    if (capacity := pool.capacity) and capacity.memory:
        memory.append(f"slots and versions {size(capacity.memory_used)} of {size(capacity.memory)}")
    if slots := sum(run.bytes for run in pool.runs):
        memory.append(f"of these, slots {size(slots)}")
    host = f"process {size(pool.memory_bytes)} of host memory" if pool.memory_bytes else ""
    parts = {"pool": about, "engine": samples, "trainer": trains, "memory": [*memory, host]}
    return Text("\n").join(
        Text.assemble((f"{head:<8}", "dim"), one_line(" · ".join(filter(None, words))))
        for head, words in parts.items()
        if any(words)
    )


def rows(pool: Pool, seen: Seen) -> dict[str, TableRow]:
    """Make a row for each run with a slot, each other run that serves, and each that waits."""
    runs = {run.name: run for run in (*seen.runs, *seen.waiting)}
    slots = {slot.run: slot for slot in pool.runs}
    loaded = [version.rpartition("@") for version in pool.loaded]
    others = [name for name, _, _ in loaded]
    rows = {}
    for name in dict.fromkeys([*slots, *others, *(run.name for run in seen.waiting)]):
        run = runs.get(name)
        slot = slots.get(name)
        phase = slot.phase if slot else ""
        rows[name] = row_of(
            {
                "run": name,
                "turn": (phase if slot else "serves" if name in others else "waits", phase),
                "waited": (
                    duration(slot.waited) if slot and slot.waited >= 1 else "",
                    slot.waited if slot else None,
                ),
                "loaded": " ".join(f"@{number}" for owner, _, number in loaded if owner == name),
                "alias": ", ".join(alias.alias for alias in seen.aliases if alias.run == name),
                "slot": (size(slot.bytes) if slot and slot.bytes else "", slot.bytes if slot else None),
                "owner": (run.owner if run else "", run.owner if run else None),
                "why": run.waiting if run else "",
            }
        )
    return rows
