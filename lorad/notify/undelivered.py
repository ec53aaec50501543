"""The error of a delivery that failed."""


class Undelivered(Exception):
    """A receiver did not take a notification; the message is a sentence without a secret.

    Args:
        wait: Seconds in which the receiver wants no other try.
    """

    def __init__(self, says: str, wait: float = 0.0) -> None:
        super().__init__(says)
        self.wait = wait
