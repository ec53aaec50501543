"""Run the daemon of `LORAD_HOME` in the foreground: `python -m lorad.daemon`. `lorad.errors` lists its exit
codes.

`--system` serves all users of this machine. Other options print JSON and start no daemon:

--check: report the state of the home's database.
--repair: rebuild the database.
--orphans: list the processes that outlived their attempt.
--end-orphans: end them.
"""

import sys
from io import TextIOWrapper

from lorad.box.paths import Home, default_home, give_home
from lorad.errors import LoradError
from lorad.startup import quick_imports


def main() -> int:
    sys.modules["pandas"] = None  # type: ignore[assignment]  # sqlite-utils loads it if it can: half of the start-up
    with quick_imports():
        from lorad.daemon.daemon import run_daemon

    give_home()
    for stream in (sys.stdout, sys.stderr):  # logs, in any locale
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.setswitchinterval(0.0005)  # a thread that reads for a list waits at most so long for its turn
    try:
        if "--repair" in sys.argv[1:]:
            repair(Home(default_home()))
        elif "--check" in sys.argv[1:]:
            _check(Home(default_home()))
        elif {"--orphans", "--end-orphans"} & {*sys.argv[1:]}:
            _orphans(Home(default_home()), end="--end-orphans" in sys.argv[1:])
        else:
            run_daemon(Home(default_home()), system="--system" in sys.argv[1:])
    except LoradError as error:
        print(f"lorad: {error}. {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


def repair(home: Home) -> None:
    import msgspec

    from lorad.daemon.record import repair

    print(msgspec.json.encode(repair.repair(home)).decode())


def _check(home: Home) -> None:
    import msgspec

    from lorad.box import config
    from lorad.daemon.record.rows_and_disk import of_home

    runs_root = (config.load(home.config).storage or home.root) / "runs"
    print(msgspec.json.encode(of_home(home, runs_root)).decode())


def _orphans(home: Home, *, end: bool) -> None:
    import msgspec

    from lorad.daemon.process.orphans import end_orphans, find_orphans

    print(msgspec.json.encode({"orphans": end_orphans(home) if end else find_orphans(home)}).decode())


if __name__ == "__main__":
    sys.exit(main())
