"""The open slots of a trainer, and which of them a verb may have."""

from typing import Protocol, TypeVar

from lorad.errors import Conflict
from lorad.trainers.base import SlotSpec, no_slot


class _OfSpec(Protocol):
    spec: SlotSpec


S = TypeVar("S", bound=_OfSpec)


class Slots(dict[str, S]):
    """The open slots by name. Taking a slot that is not open raises NotFound."""

    def __missing__(self, name: str) -> S:
        raise no_slot(name, self)

    def close(self, name: str) -> S:
        """Forget a slot."""
        slot = self[name]
        del self[name]
        return slot

    def trained(self, name: str) -> S:
        """Return a slot that can be trained. Raises Conflict for a frozen slot."""
        if (slot := self[name]).spec.frozen:
            raise Conflict(
                f"slot {name} is frozen: it gives log-probabilities only", hint="Open another one to train."
            )
        return slot

    def policy(self, name: str) -> S:
        """Return a slot whose policy can be trained. Raises Conflict for a frozen slot, and for a critic."""
        if (slot := self.trained(name)).spec.critic:
            raise Conflict(f"slot {name} is a critic: it has no policy", hint="Use value_backward.")
        return slot

    def critic(self, name: str, *, trained: bool = False) -> S:
        """Return a critic. Raises Conflict for a policy, and for a frozen critic that is to be trained."""
        if not (slot := self[name]).spec.critic:
            raise Conflict(f"slot {name} is no critic: it has no values", hint="Open one with `critic`.")
        return self.trained(name) if trained else slot
