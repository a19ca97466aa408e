"""Runs the `tbhooks` command: `python -m tbhooks`."""

import sys

from tbhooks.cli import main

if __name__ == "__main__":
    sys.exit(main())
