"""Run the `lorad` command, as `python -m lorad`."""

from lorad.cli.app import main

if __name__ == "__main__":
    main()
