"""`tbhooks run`: an unchanged training script, watched.

`command` understands the options, `launching` runs the script as `python` would, `session` looks on while it runs:
`finding` and `covering` find the models, `destinations` where their runs go, `session` what is patched meanwhile,
`terminal` and `telling` are all that is said. Nothing here loads torch before the script does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tbhooks.cli.run import options as command
from tbhooks.cli.run import session
from tbhooks.data.errors import TbhooksError

# The exit code of a command that cannot do what it was asked.
_REFUSED = 2


def main(arguments: Sequence[str]) -> int:
    """Runs the script that is named there; what it raises comes out of here."""
    try:
        options, target = command.understood(arguments, os.environ)
    except TbhooksError as problem:
        sys.stderr.write(f"tbhooks run: {problem}\n")
        return _REFUSED
    session.run(options, target)
    return 0
