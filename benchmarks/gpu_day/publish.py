"""From an optimizer step to an engine that serves the new version, in process and through files."""

import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_day.stage import Place, play
from benchmarks.gpu_day.torch_place import gradient_seconds, opened, prompts_for, slot_spec, work_of
from benchmarks.kit.ours import Lorad
from lorad.adapters.directory import write_directory
from lorad.adapters.peft import write_peft
from lorad.engines.base import AdapterSource
from lorad.errors import AdapterRefused
from lorad.protocol.batch import Sampling

_TURNS = 3  # the last one counts


async def measured(place: Place) -> None:
    size = place.size
    async with opened(place, place.dense) as held:
        spec = slot_spec([*held.trainer.modules()], size.rank, *size.microbatches[0])
        await held.trainer.open("slot", spec)
        await gradient_seconds(held.trainer, "slot", work_of(place, held.base.config.vocab_size, 1))
        figures: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(_TURNS):
                await held.trainer.optim_step("slot", 1e-4, 1.0)
                figures = await _publish(held, f"v@{turn}", Path(folder) / str(turn))
        for name, value in figures.items():
            place.say(name, value)
        await held.complete(f"v@{_TURNS - 1}", prompts_for(place, held, 1, 0), Sampling(1))


async def _publish(held: Lorad, name: str, directory: Path) -> dict[str, float]:
    began = time.perf_counter()
    adapter = await held.trainer.export("slot")
    exported = time.perf_counter()
    digest = adapter.digest()
    if not adapter.is_finite():
        raise AdapterRefused("the adapter is not finite", hint="See the stage `train`.")
    hashed = time.perf_counter()
    await held.engine.load(name, AdapterSource(digest, adapter))
    loaded = time.perf_counter()
    write_directory(directory, lambda made: write_peft(adapter, made, "random"))
    return {
        "mib": adapter.bytes / (1 << 20),
        "export_s": exported - began,
        "digest_s": hashed - exported,
        "engine_load_s": loaded - hashed,
        "in_process_s": loaded - began,
        "write_files_s": time.perf_counter() - loaded,
    }


def publish(place: Place) -> None:
    asyncio.run(measured(place))


if __name__ == "__main__":
    play(publish)
