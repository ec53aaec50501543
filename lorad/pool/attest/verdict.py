"""What is claimed of a version, what the tests of its attestation found, and the verdict over all of them."""

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from lorad.pool.attest.amplified import Amplified, Prediction
from lorad.pool.attest.canaries import Canaries
from lorad.protocol.calls import Attestation

_MOST_NAMED = 3  # experts in the words of a verdict


class Claim(Struct, frozen=True):
    """What the trainer says of a version that the engine is to serve.

    Attributes:
        trainer: The trainer's log-probabilities, float64 [T].
        previous: dt of the version before; None where that is the base.
        previous_name: The name that the engine has for the version before.
        prediction: What the amplified test needs; None where that is not made now.
        proven: `Attester.returns` when that test passed last, with an earlier version of the run; None where
            it never has.
    """

    canaries: Canaries
    trainer: np.ndarray
    previous: np.ndarray | None = None
    previous_name: str = ""
    prediction: Prediction | None = None
    proven: int | None = None


class Outcome(Struct, frozen=True):
    """What the tests of a version found.

    Attributes:
        named, amplified: The results of these tests; None where they were not made.
        unmet: The adapted experts that no canary is sent to, of which nothing was proved; None where the
            trainer does not know.
        is_dora: Whether it has magnitudes of DoRA. Alpha times K makes all of A and B plain to see and not
            these, so that the amplified test can fail such a version and never prove one.
    """

    direct: Attestation
    named: Attestation | None = None
    amplified: Amplified | None = None
    unmet: tuple[str, ...] | None = ()
    is_dora: bool = False

    @property
    def changes_nothing(self) -> bool:
        """Return whether the adapter equals the base according to the trainer's own log-probabilities."""
        return self.direct.verdict == "passed" and "rel" not in self.direct.facts

    def wants_more(self, *, is_proven: bool) -> bool:
        """Return whether an amplified test, or one on more canaries, could decide what these left open."""
        if (
            self.named is None
            or "failed" in (self.direct.verdict, self.named.verdict)
            or self.changes_nothing
        ):
            return False
        if self.amplified is not None:
            return self.amplified.worth_repeating
        return self.named.verdict == "inconclusive" or not is_proven

    def verdict(self, *, is_proven: bool) -> Attestation:
        """Return the verdict over all tests. It `is_proven` where the amplified test passed with an earlier
        version, and the engine has been the same since.
        """
        parts = [self.direct, *([self.named] if self.named else [])]
        parts += [self.amplified.verdict] if self.amplified else []
        facts = {key: number for part in parts for key, number in part.facts.items()}
        failed = next((part for part in parts if part.verdict == "failed"), None)
        if failed is not None:
            attestation = replace(failed, facts=facts)
        elif self.named is None or self.changes_nothing:
            attestation = replace(self.direct, facts=facts)
        else:
            is_known = is_proven if self.amplified is None else self.amplified.verdict.verdict == "passed"
            is_known = is_known and not self.is_dora
            if self.named.verdict == "passed" and (is_known or self.direct.verdict == "passed"):
                passed = "; ".join(part.detail for part in reversed(parts) if part.verdict == "passed")
                attestation = Attestation("passed", passed, facts)
            else:
                details = [part.detail for part in reversed(parts) if part.verdict == "inconclusive"]
                details += ["no amplified test proves the magnitudes of DoRA"] * self.is_dora
                attestation = Attestation("inconclusive", "; ".join(details), facts)
        if attestation.verdict == "failed" or self.unmet == ():
            return attestation
        if self.unmet is None:
            detail = f"{attestation.detail}; it is not known which of its experts the canaries meet"
            return replace(attestation, detail=detail)
        named = ", ".join(self.unmet[:_MOST_NAMED]) + (", …" if len(self.unmet) > _MOST_NAMED else "")
        detail = f"{attestation.detail}; no canary meets {len(self.unmet)} of its experts: {named}"
        return replace(
            attestation, detail=detail, facts={**attestation.facts, "experts_unmet": float(len(self.unmet))}
        )
