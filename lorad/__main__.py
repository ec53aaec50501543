"""Run the `lorad` command, as `python -m lorad`."""

import os
import sys


def main() -> int | None:
    """Run `lorad`: `daemon dial` without what commands for people import.

    A key that sshd lets do nothing else, `command="lorad daemon dial",restrict`, may also ask where the
    daemon is, as a client does first.
    """
    if sys.argv[1:] == ["daemon", "dial"]:
        command = os.environ.get("SSH_ORIGINAL_COMMAND", "daemon dial")
        if command.endswith("daemon dial"):
            from lorad.client.boxes.dial import dial

            return dial()
        if not command.endswith("daemon socket --json"):
            print("error: this key is for `lorad daemon dial`, and calls nothing else", file=sys.stderr)
            return 4
        os.environ["LORAD_HOST"] = "here"
        sys.argv[2:] = ["socket", "--json"]
    from lorad.cli.app import main as run

    run()
    return None


if __name__ == "__main__":
    sys.exit(main())
