"""Commands of the user's own on keys: a run's values are put into their words, and no shell reads them."""

import shlex
from string import Template

from lorad.box.config import UserCommand
from lorad.box.paths import Home
from lorad.client.client import Client
from lorad.errors import Conflict


def filled_in(command: UserCommand, client: Client, run: str, version: str) -> list[str]:
    """Return the words of a command about a run. It asks the daemon, so it is for a thread.

    version: The chosen version as RUN@N; "" is the run's current one.

    Raises Conflict where a value is missing, or holds anything that a shell or a command could read as more
    than a name: a run's name is what somebody else wrote.
    """
    details = client.show(run)
    if not version and details.version is not None:
        version = f"{run}@{details.version}"
    directory = details.directory
    if not isinstance(client.where, Home):
        directory = f"{client.where.entry.ssh}:{directory}"
    values = {"RUN": run, "VERSION": version, "DIR": directory}
    for name, value in values.items():
        if f"${name}" not in command.run.replace("{", ""):
            continue
        if not value:
            raise Conflict(f"${name} is not known: {run} has no version yet.", hint="")
        if shlex.quote(value) != value or value.startswith("-"):
            message = f"${name} is {value!r}, which a command could read as more than a name: nothing is run."
            raise Conflict(message, hint="`lorad rename` gives a run another name.")
    return [Template(word).substitute(values) for word in shlex.split(command.run)]
