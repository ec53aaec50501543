"""Verb five: publish the new weights as a version, which counts once it is attested and journaled."""

from lorad.driver.attempt.versions import version_fact
from lorad.driver.sampling.spread import movement
from lorad.driver.session import Session
from lorad.protocol.calls import LoadVersion, Publish, Published


def publish(session: Session, step: int) -> Published:
    """Publish version `next_version` with the slot's weights after `step` steps.

    Raises AttestationFailed, AdapterRefused, StorageError (the run's directory is gone).
    """
    state = session.state
    lora = session.spec.lora
    number = state.next_version
    parent = state.version if state.version >= 0 else None
    before = (session.params.origin or None) if parent is None else f"{session.params.run}@{parent}"
    directory = session.run_dir.version(number)
    with session.timed("publish"):
        session.journal.check_place()
        published: Published = session.pool.call("publish", Publish(number, step, before, str(directory)))
        fact = version_fact(published, number, parent, session.run_dir, lora)
        session.journal.append("version", step, fact)
    state.version = number
    state.next_version = number + 1
    state.published = step
    session.current_sha256 = published.sha256
    session.movement = movement(published)
    session.seconds["attest"] = session.seconds.get("attest", 0.0) + published.attest_seconds
    return published


def publish_changes(session: Session, step: int) -> None:
    """Publish the weights after `step` steps, unless the current version has them."""
    if session.state.changed > session.state.published:
        publish(session, step)


def reset_reference(session: Session) -> None:
    """Make the current version the reference of the KL penalty, every algorithm.kl.reset_every steps."""
    every = session.spec.algorithm.kl.reset_every
    state = session.state
    if not every or state.step % every:
        return
    directory = session.run_dir.version(state.version)
    name = f"{session.params.run}@reference"
    session.pool.call("set_reference", LoadVersion(name, str(directory), session.current_sha256))
    session.reference = directory
    state.reference_sha256 = session.current_sha256
    print(f"{session.name_of(state.version)} is the reference of the KL penalty from now on", flush=True)
