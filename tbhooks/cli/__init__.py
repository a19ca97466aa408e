"""The `tbhooks` command. Only the chosen subcommand is imported: under `tbhooks run`, a script finds no module loaded
that it did not import itself.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default those of the process. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["run"]:
        from tbhooks.cli import run  # noqa: PLC0415

        return run.main(words[1:])
    from tbhooks.cli import commands  # noqa: PLC0415

    return commands.main(words)
