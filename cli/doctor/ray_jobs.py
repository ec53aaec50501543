"""Is this process part of a Ray job whose cluster lorad does not know?"""

import os
from collections.abc import Iterator

from lorad.box.config import Config
from lorad.children.interpreter import InterpreterFinding

_MARKS = ("RAY_JOB_ID", "RAY_ADDRESS")


def ray_job_check(settings: Config) -> Iterator[InterpreterFinding]:
    """Check that GPUs which Ray gave to others are not taken: lorad finds those of this machine by NVML."""
    variables = [name for name in _MARKS if os.environ.get(name)]
    if not variables:
        return
    is_ray = settings.cluster is not None and settings.cluster.kind == "ray"
    hint = (
        "Add `cluster: {kind: ray, python: PYTHON}` (that has Ray) to config.yaml (docs/cluster-recipes.md), "
        "or unset these variables where this machine's GPUs are yours alone."
    )
    detail = f"{' and '.join(variables)} set, and config.yaml " + (
        "names a Ray cluster"
        if is_ray
        else "names no Ray cluster: runs would take GPUs that Ray gave to others"
    )
    yield InterpreterFinding("ray", is_ray, detail, hint)
