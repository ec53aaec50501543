"""Run the daemon of `LORAD_HOME` in the foreground: `python -m lorad.daemon`.

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
        import msgspec

        from lorad.daemon.daemon import run_daemon

    give_home()
    for stream in (sys.stdout, sys.stderr):  # logs, in any locale
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.setswitchinterval(0.0005)  # a thread that reads for a list waits at most so long for its turn
    try:
        options = {*sys.argv[1:]}
        home = Home(default_home())
        answer: object
        if "--repair" in options:
            from lorad.daemon.record.repair import repair

            answer = repair(home)
        elif "--check" in options:
            from lorad.box import config
            from lorad.daemon.record.rows_and_disk import take_census

            answer = take_census(home, (config.load(home.config).storage or home.root) / "runs")
        elif options & {"--orphans", "--end-orphans"}:
            from lorad.daemon.process.orphans import end_orphans, find_orphans

            answer = {"orphans": end_orphans(home) if "--end-orphans" in options else find_orphans(home)}
        else:
            run_daemon(home, system="--system" in options)
            return 0
        print(msgspec.json.encode(answer).decode())
    except LoradError as error:
        print(f"lorad: {error}. {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
