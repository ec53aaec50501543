"""Which checkpoint an attempt resumes from."""

from collections.abc import Sequence
from pathlib import Path

from lorad.adapters import directory
from lorad.box.paths import RunDir
from lorad.errors import IntegrityError, NotFound
from lorad.protocol.driver_params import DriverParams
from lorad.protocol.journal import Record

STATE = "state.json"  # in a checkpoint, the driver's own


def chosen_checkpoint(run_dir: RunDir, params: DriverParams, facts: Sequence[Record]) -> Path | None:
    """Return the directory of the checkpoint at `resume_step`, else of the newest; None when there is none.

    facts: the surviving lineage. Raises NotFound, or IntegrityError naming the damaged file and the
    checkpoint before.
    """
    resume_step = params.resume_step
    present = [f for f in facts if f.kind == "checkpoint" and (run_dir.root / f.data["path"]).exists()]
    chosen = [f for f in present if resume_step is None or f.step == resume_step]
    if not chosen:
        if resume_step is not None:
            steps = ", ".join(str(f.step) for f in present) or "none"
            raise NotFound(f"no checkpoint at step {resume_step}", hint=f"There are checkpoints at: {steps}.")
        return None
    path: Path = run_dir.root / chosen[-1].data["path"]
    try:
        directory.verify(path)
    except IntegrityError as error:
        step = chosen[-1].step
        before = [f.step for f in present if f.step < step]
        hint = f"Continue from the one before: `lorad resume {params.run} --from {before[-1]}`."
        raise IntegrityError(
            f"checkpoint at step {step}: {error.message}", hint=hint if before else ""
        ) from None
    return path
