"""`save`: the slot's state into a directory of the driver's, once the files of every version are on disk."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from lorad.errors import StorageError
from lorad.pool.state import Pool
from lorad.protocol.calls import Call, Save, Saved


async def save(pool: Pool, call: Call, args: Save) -> Saved:
    """Raises StorageError when the disk does not take it, or did not take a version."""
    tenant = pool.tenant(call)
    try:
        files = await pool.trainer.save(tenant.run, Path(args.directory))
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{args.directory} could not be written: {error}",
            hint="Free some space (`lorad rm` deletes a run), then resume.",
        ) from error
    await pool.files.flush(tenant.run)
    return Saved(files)
