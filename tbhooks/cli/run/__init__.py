"""`tbhooks run`: runs an unmodified training script with monitoring.

`options` parses the command line, `launcher` runs the script as `python` would, and `session` watches its models:
`model_finder` finds them, `destinations` decides where their runs go, and `console` prints. Nothing here imports torch
before the script does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tbhooks.cli.run import options, session
from tbhooks.data.errors import TbhooksError

# The exit code for a wrong argument.
_WRONG_ARGUMENT = 2


def main(arguments: Sequence[str]) -> int:
    """Runs the script named by the arguments and returns 0. What the script raises is not caught."""
    try:
        parsed, target = options.parse(arguments, os.environ)
    except TbhooksError as problem:
        sys.stderr.write(f"tbhooks run: {problem}\n")
        return _WRONG_ARGUMENT
    session.run(parsed, target)
    return 0
