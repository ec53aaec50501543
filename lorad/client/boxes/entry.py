"""How a box is reached, as an entry of the user's hosts.yaml says it."""

import os
from pathlib import Path

import msgspec


class BoxEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A box of hosts.yaml.

    ssh: what ssh is called with: a name of its configuration, user@host, or ssh://user@host:port.
    lorad: the command there; a shell that ssh starts has the PATH of no virtual environment.
    home: LORAD_HOME there; "" is that user's own.
    cwd: the directory there in which relative paths of specs begin.
    """

    ssh: str
    lorad: str = "lorad"
    home: str = ""
    cwd: str = ""


def hosts_path() -> Path:
    """Return the path of the user's hosts.yaml, which need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "lorad" / "hosts.yaml"
