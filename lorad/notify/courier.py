"""Delivers a table of messages, each tried again after growing waits for a bounded time."""

import asyncio
import logging
import random
import time
from collections.abc import Iterable

from lorad.notify.deliver import deliver
from lorad.notify.table import Delivery, Failed, State, Undelivered

log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 6 * 3600.0  # after it happened
_FIRST_PAUSE = 1.0  # seconds
_LONGEST_PAUSE = 600.0  # seconds
_AT_ONCE = 8  # tries


class Courier:
    """Delivers within one event loop, and remembers what became of each delivery."""

    def __init__(self, earlier: State) -> None:
        """Begin with what an earlier life reached."""
        self._done = set(earlier.done)
        self._given_up = {failed.key: failed for failed in earlier.given_up}
        self._faults: dict[str, Failed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._changed = asyncio.Event()

    def deliver_only(self, deliveries: Iterable[Delivery]) -> None:
        """Deliver these from now on, and forget all others."""
        by_key = {delivery.key: delivery for delivery in deliveries}
        for key in set(self._tasks) - set(by_key):
            self._tasks.pop(key).cancel()
        self._done &= set(by_key)
        self._given_up = {key: failed for key, failed in self._given_up.items() if key in by_key}
        self._faults = {key: failed for key, failed in self._faults.items() if key in by_key}
        for key, delivery in by_key.items():
            if key not in self._tasks and key not in self._done and key not in self._given_up:
                self._tasks[key] = asyncio.create_task(self._try_until_done(delivery))

    @property
    def state(self) -> State:
        """Return which deliveries are done, given up and failing now."""
        return State(sorted(self._done), [*self._given_up.values()], [*self._faults.values()])

    async def changed(self, seconds: float) -> None:
        """Wait until something was delivered or failed, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    async def stop(self) -> None:
        """End what is under way; commands are killed, and the next life delivers the rest."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _try_until_done(self, delivery: Delivery) -> None:
        """Try to deliver until that succeeds, or for GIVE_UP_SECONDS."""
        key = delivery.key
        message = delivery.message
        pause = 0.0
        while True:
            try:
                async with self._limit:
                    await deliver(delivery)
            except Undelivered as error:
                failed = Failed(key, str(error))
                pause = min(2 * pause or _FIRST_PAUSE, _LONGEST_PAUSE)
                wait = max(error.wait, pause * random.uniform(0.75, 1.0))
            except Exception as error:
                log.exception("%s of %s", message.event, message.run)
                failed = Failed(key, f"{type(error).__name__} in lorad: see the log")
                pause = wait = _LONGEST_PAUSE
            else:
                log.info("%s of %s: delivered to %s", message.event, message.run, delivery.to.title)
                self._done.add(key)
                break
            log.error("%s of %s: %s: %s", message.event, message.run, delivery.to.title, failed.says)
            if time.time() + wait > message.at + GIVE_UP_SECONDS:
                self._given_up[key] = failed
                break
            self._faults[key] = failed
            self._changed.set()
            await asyncio.sleep(wait)
        self._faults.pop(key, None)
        self._changed.set()
