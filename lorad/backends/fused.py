"""A trainer of one rank and the engine over transformers on one module, in one process."""

from collections.abc import Callable, Mapping
from pathlib import Path

from lorad.engines.generic.engine import TransformersEngine
from lorad.engines.generic.model import GenericModel
from lorad.models.compute import Compute
from lorad.trainers.fsdp.in_process import FusedTrainer
from lorad.trainers.sharded.body import BodySettings


async def start_fused(
    compute: Compute,
    settings: BodySettings,
    name: str,
    shapes: Mapping[str, tuple[int, int]],
    cache: Callable[[GenericModel], int],
    *,
    mix_calls: bool,
) -> tuple[FusedTrainer, TransformersEngine]:
    """Load a base once and have a trainer and an engine on it. Raises what `open_body` raises.

    Args:
        compute: The pool's; every call of the module is on it.
        settings: What the base is; it stays whole.
        name: What the configurations of adapters call it.
        shapes: (out, in) of its linears.
        cache: Gives the bytes for keys and values, once the base is loaded.
        mix_calls: As of the engine.
    """
    trainer = await FusedTrainer.start(compute, settings, name)
    try:
        body = trainer.body
        model = GenericModel(body.model, body.dtype, body.device, body.linears, body.lent)
        directory = Path(settings.model)
        engine = TransformersEngine(
            model, compute, directory, shapes, cache_bytes=cache(model), mix_calls=mix_calls
        )
        return trainer, engine
    except BaseException:
        await trainer.shut_down()
        raise
