"""Open the database and the daemon's journal of a home, and notice where one is behind the other."""

import logging
import sys

import lorad
from lorad.box.paths import Home
from lorad.daemon.journal import STARTED, DaemonJournal, backwards
from lorad.errors import Conflict, IntegrityError
from lorad.store.db import Store
from lorad.store.record import Change

log = logging.getLogger("lorad.daemon")

_REPAIR = (
    "`lorad doctor --repair` rebuilds the database from the journals; to start from scratch, set "
    "LORAD_HOME elsewhere."
)


def open_store(home: Home) -> Store:
    """Raises what Store does, and IntegrityError when the database is gone, or older than the journal."""
    is_gone = not home.database.exists() or home.database.stat().st_size == 0
    if is_gone and home.journal.is_file() and home.journal.stat().st_size:
        message = f"{home.database} is gone, and {home.journal} records what was in it"
        raise IntegrityError(message, hint=_REPAIR)
    try:
        return Store(home.database)
    except OSError as error:
        raise IntegrityError(f"{error.filename or home.database}: {error.strerror}", hint=_REPAIR) from error
    except Conflict as error:
        started = (line for kind, line in backwards(home.journal) if kind == STARTED)
        wrote = next((line.get("version", "") for line in started if isinstance(line, dict)), "")
        requirement = f"'lorad>={wrote}'" if wrote and wrote != lorad.__version__ else "lorad"
        message = f"{error.message} (lorad {lorad.__version__}{f', it was lorad {wrote}' if wrote else ''})"
        hint = (
            f"`{sys.executable} -m pip install -U {requirement}` updates lorad. To continue with this one: "
            "`lorad doctor --repair` builds a database for it from the journals, with all that happened "
            f"since, and keeps the newer one. (As it was before the upgrade: {home.database.name}.before-*.)"
        )
        raise Conflict(message, hint=hint) from error


def open_journal(home: Home) -> DaemonJournal:
    """Raises IntegrityError when it cannot be opened."""
    try:
        return DaemonJournal(home.journal)
    except OSError as error:
        hint = "Move it aside: the daemon then writes a new one from the database. "
        hint += "(`lorad doctor --repair` needs it.)"
        raise IntegrityError(f"{home.journal}: {error.strerror}", hint=hint) from error


def record(store: Store, journal: DaemonJournal) -> None:
    """Make the store write to the journal everything that a rebuild of the database needs.

    The newest change of the journal may be missing in the database, where a daemon died in between. A journal
    that lacks changes (it was lost or damaged, or the schema was upgraded) gets the whole database.

    Raises IntegrityError.
    """
    recorded = store.recorded
    changes = (line for _, line in backwards(journal.path) if isinstance(line, Change))
    written = next((change.number for change in changes), None)
    if written is not None and written > recorded + 1:
        more = f"which records {written - recorded} more changes"
        raise IntegrityError(f"{store.path} is older than {journal.path}, {more}", hint=_REPAIR)
    is_behind = written != recorded or store.is_upgraded
    if is_behind:
        log.info("the journal gets all of the database: it has change %s, the database %d", written, recorded)
    store.record(journal, all=is_behind)
