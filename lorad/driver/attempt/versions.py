"""The record of a version that was published."""

from lorad.box.paths import RunDir
from lorad.protocol.calls import Published
from lorad.protocol.journal import VersionFact
from lorad.spec.lora import Lora


def version_fact(
    done: Published, number: int, parent: int | None, run_dir: RunDir, lora: Lora
) -> VersionFact:
    """Return the journal's record of a version. parent: the number of the one before it, if there is one."""
    path = run_dir.version(number)
    return VersionFact(
        version=number,
        sha256=done.sha256,
        parent=parent,
        path=str(path.relative_to(run_dir.root)),
        rank=lora.rank,
        alpha=lora.alpha,
        bytes=done.bytes,
        attested=done.attestation.verdict,
        attestation=done.attestation.detail,
        delivered_sha256=done.attestation.delivered_sha256,
    )
