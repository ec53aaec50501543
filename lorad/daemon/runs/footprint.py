"""The bytes that a run's versions and checkpoints take on disk, before there are any. Pure."""

from lorad.client.check_shapes import Files
from lorad.protocol.preflight import SpecFacts
from lorad.spec.model import Spec

_NUMBER = 4  # bytes of a number in fp32, which files hold
_OF_SLOT = 3  # a weight and two moments of Adam


def footprint(spec: Spec, facts: SpecFacts, free: int | None = None) -> Files:
    """Count what `checkpoint` of the spec keeps once the run is over; samples and logs are not counted.

    free: bytes on the disk.
    """
    kept, steps = spec.checkpoint, spec.trainer.steps
    versions = steps + 1
    if kept.keep_versions:
        versions = min(versions, kept.keep_versions + kept.keep_best)
    made = -(-steps // kept.every) + kept.keep_best
    checkpoints = min(made, kept.keep + kept.keep_best) if kept.keep else made
    version = _NUMBER * facts.adapter_parameters
    checkpoint = _NUMBER * _OF_SLOT * (facts.adapter_parameters + facts.critic_parameters)
    total = versions * version + checkpoints * checkpoint
    return Files(versions, version, checkpoints, checkpoint, total, free)
