"""The boxes that commands may be about: `hosts.yaml` of the user, and which of them was chosen.

The file is the user's and not a home's: `$XDG_CONFIG_HOME/lorad/hosts.yaml`. What stands here is ssh's own:
names of `~/.ssh/config`, or `user@host`; lorad adds no keys and no ports.
"""

import os
import re
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from lorad.box.config import AlarmLimits, config_of
from lorad.box.paths import Home, default_home
from lorad.client.boxes.entry import BoxEntry, hosts_path
from lorad.errors import SpecError

if TYPE_CHECKING:
    from lorad.client.boxes.remote import FarHome

Place: TypeAlias = "Home | FarHome"  # where a daemon and its files are
HERE = "here"  # this machine, whatever the default is
HOST = "LORAD_HOST"  # in the environment: the box of every command
SEND = "LORAD_HOST_SEND"  # in the environment: whether files are sent along
CWD = "LORAD_HOST_CWD"  # in the environment: where relative paths begin on it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ALL = "all"  # every box and this machine, for `lorad list`
_RESERVED = (HERE, ALL)


class HostsFile(msgspec.Struct, forbid_unknown_fields=True):
    """The boxes of hosts.yaml by name, and the box of commands that name none."""

    hosts: dict[str, BoxEntry] = {}
    default: str = HERE


def read_hosts() -> HostsFile:
    """Read hosts.yaml, if there is one that this user may read. Raises SpecError for a mistake in it."""
    try:
        text = hosts_path().read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return HostsFile()
    import yaml  # slow, and most users have no such file

    hint = "For example `hosts: {h1: {ssh: ann@h1}}`; `lorad hosts add` writes it."
    try:
        hosts = msgspec.convert(yaml.safe_load(text) or {}, HostsFile)
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{hosts_path()}: {' '.join(str(error).split())}", hint=hint) from None
    for name, entry in hosts.hosts.items():
        check_entry(name, entry)
    if hosts.default != HERE and hosts.default not in hosts.hosts:
        raise SpecError(f"{hosts_path()}: default: there is no host {hosts.default}", hint=hint)
    return hosts


def check_entry(name: str, entry: BoxEntry) -> None:
    """Raise SpecError for a box that cannot be called so, or that ssh would take for an option."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        hint = "Letters, digits, dots and dashes; not here or all."
        raise SpecError(f"{name} cannot name a host", hint=hint)
    if not entry.ssh or entry.ssh.startswith("-") or any(letter.isspace() for letter in entry.ssh):
        hint = "Name what `ssh` takes: a host of ~/.ssh/config, or user@host."
        raise SpecError(f"{name}: {entry.ssh!r} is no destination of ssh", hint=hint)


def place() -> Place:
    """Return whose daemon the commands of this process ask: a home here, or one on another box.

    Raises SpecError where the box is unknown, or LORAD_HOME contradicts it.
    """
    name = os.environ.get(HOST, "")
    if name == HERE or not (name or os.path.exists(hosts_path())):
        return Home(default_home())
    if not name:
        name = read_hosts().default
        if name == HERE or os.environ.get("LORAD_HOME"):  # a home is the nearer word
            return Home(default_home())
    elif home := os.environ.get("LORAD_HOME"):
        message = f"LORAD_HOME={home} is a home of this machine, and host {name} is another one"
        hint = f"Unset LORAD_HOME; `lorad hosts add {name} … --home DIR` names a home there."
        raise SpecError(message, hint=hint)
    return far_home(name)


def limits_of(where: Place) -> AlarmLimits:
    """Return when alarms are raised for runs of a home. Raises SpecError for a config.yaml with a mistake."""
    return config_of(where).alarms if isinstance(where, Home) else where.facts().alarms


def far_home(name: str, *, asks: bool = True) -> "FarHome":
    """Return the home on the box of this name, or of `ssh://[USER@]HOST[:PORT][/HOME]`. Raises SpecError.

    asks: whether ssh may ask for a password on the terminal.
    """
    from lorad.client.boxes.remote import FarHome  # for most commands there is no other machine

    if name.startswith("ssh://"):
        target, slash, home = name.removeprefix("ssh://").partition("/")
        entry = BoxEntry(f"ssh://{target}", home=f"{slash}{home}")
        check_entry("box", entry)
    else:
        hosts = read_hosts().hosts
        if name not in hosts:
            names = f"There are {', '.join(hosts)}; `" if hosts else "`"
            hint = f"{names}lorad hosts add {name} USER@HOST` adds it."
            raise SpecError(f"there is no host {name}", hint=hint)
        entry = hosts[name]
    return FarHome(name, entry, os.environ.get(CWD, ""), asks, bool(os.environ.get(SEND)))
