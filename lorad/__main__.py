"""`python -m lorad` is the `lorad` command."""

from lorad.cli.app import main

if __name__ == "__main__":
    main()
