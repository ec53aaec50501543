"""Run the gateway of a home until SIGTERM: `python -m lorad.gateway HOME`. Exit code 1: it could not start.

`HOME front` and `HOME owner` run the two gateways of a home that several users share: see `shared/front.py`.
"""

import os
import sys

from lorad.startup import quick_imports

with quick_imports():
    from lorad.box import config
    from lorad.box.paths import Home
    from lorad.http.service import Service, run_service


def _gateway_of(home: Home, role: str) -> Service:
    """Make the gateway of a role.

    The front never loads a tokenizer or a template, and a user cannot read config.yaml of a shared home.
    """
    if role == "front":
        from lorad.gateway.shared.front import fronting

        return fronting(home, config.load(home.config).gateway)
    from lorad.gateway.own.app import answering, answering_as_owner

    if role == "owner":
        return answering_as_owner(home, os.getuid())
    return answering(home, config.load(home.config).gateway)


if __name__ == "__main__":
    sys.exit(run_service("the gateway", "lorad.gateway", _gateway_of))
