"""Run the door of a home for the tinker client until SIGTERM: `python -m lorad.tinker HOME`.

Exit code 1: it could not start. `HOME front` and `HOME owner` run the two doors of a home that several users
share: see `shared/front.py`.
"""

import os
import sys

from lorad.startup import quick_imports

with quick_imports():
    from lorad.box import config
    from lorad.box.paths import Home
    from lorad.errors import SpecError
    from lorad.http.service import Service, run_service

_PROTOBUF = "Install it: pip install 'lorad[tinker]'."


def _door_of(home: Home, role: str) -> Service:
    """Make the door of a role. The front loads nothing of a model.

    Raises SpecError where protobuf is missing.
    """
    if role == "front":
        from lorad.tinker.shared.front import fronting

        return fronting(home, config.load(home.config).tinker)
    try:
        from lorad.tinker.door.app import answering, answering_as_owner
    except ModuleNotFoundError as error:
        raise SpecError(f"the door needs {error.name}, which is not installed", hint=_PROTOBUF) from None
    if role == "owner":
        return answering_as_owner(home, config.door_settings(), os.getuid())
    return answering(home, config.load(home.config).tinker)


if __name__ == "__main__":
    sys.exit(run_service("the Tinker door", "lorad.tinker", _door_of))
