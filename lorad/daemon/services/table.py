"""The table of services, which one verb of the loop keeps. Another service is a row here and its program."""

from collections.abc import Iterator

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context
from lorad.daemon.guarded import each
from lorad.daemon.services.door import DOOR
from lorad.daemon.services.gateway import GATEWAY
from lorad.daemon.services.loggers import LOGGERS
from lorad.daemon.services.notify import NOTIFY
from lorad.daemon.services.service import (
    OWN,
    Failure,
    Service,
    Upkeep,
    give_table,
    keep,
    newest_lives,
    process_of,
    put_away,
)
from lorad.daemon.troubles import Item
from lorad.errors import StorageError

SERVICES: tuple[Service, ...] = (GATEWAY, DOOR, LOGGERS, NOTIFY)


def keep_services(ctx: Context) -> None:
    """Keep every process up that a service needs, give it its table, and put the others away. Trouble with a
    process affects no other; the failures that processes report are troubles too.
    """
    processes: list[tuple[Service, int, Upkeep]] = []
    failures: list[Failure] = []

    def look_at_service(ctx: Context, service: Service) -> None:
        processes.extend((service, uid, upkeep) for uid, upkeep in service.look(ctx).items())

    def keep_process(ctx: Context, row: tuple[Service, int, Upkeep]) -> None:
        service, uid, upkeep = row
        process = process_of(ctx, service, uid)
        if upkeep == "away":
            put_away(ctx, process)
            return
        if service.table is not None:
            give_table(ctx, process, service.table(ctx, process))
        keep(ctx, process, start=upkeep == "up")
        if service.take is not None:
            failures.extend(service.take(ctx, process))

    def item_of(row: tuple[Service, int, Upkeep]) -> Item:
        service, uid, _ = row
        return Item(service.title) if uid == OWN else Item(f"{service.title} of user {uid}", uid)

    each(ctx, look_at_service, SERVICES, lambda service: Item(service.title))
    each(ctx, keep_process, processes, item_of)
    each(ctx, _report, failures, lambda failure: failure.item)


def _report(ctx: Context, failure: Failure) -> None:
    """Raises StorageError, so that the failure is a trouble for as long as a process reports it."""
    raise StorageError(failure.says, hint=failure.hint)


def living_services(ctx: Context) -> Iterator[tuple[Service, AttemptDir]]:
    """Yield the newest life of each process of every service."""
    for service in SERVICES:
        for attempt in newest_lives(ctx, service).values():
            yield service, attempt
