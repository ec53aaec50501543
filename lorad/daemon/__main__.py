"""`python -m lorad.daemon`: the daemon of `LORAD_HOME`, in the foreground. Exit codes are those of `lorad.errors`."""

from __future__ import annotations

import sys

from lorad.errors import LoradError
from lorad.paths import Home, default_home


def main() -> int:
    sys.modules["pandas"] = None  # type: ignore[assignment]  # sqlite-utils loads it if it can: half of the start-up
    from lorad.daemon.run import run_daemon

    try:
        run_daemon(Home(default_home()))
    except LoradError as error:
        print(f"lorad: {error}. {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
