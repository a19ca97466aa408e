"""What a run is called if the user names only the place for runs: a directory that ends with a slash."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch import nn

from tbhooks.agreement import own_name
from tbhooks.remote import is_remote
from tbhooks.select import unwrap


def name_of(model: nn.Module) -> str:
    """What its runs are called after."""
    return own_name(unwrap(model))


def run_of(writer: Any, named: str) -> Any:
    """`runs/` becomes `runs/<model>-<time>`, which is nobody else's; every other writer is as it was given."""
    if not isinstance(writer, str) or not is_place(writer):
        return writer
    name = f"{writer}{named}-{now()}"
    return name if is_remote(writer) else _made(name)


def now() -> str:
    """The time as names of runs have it."""
    return time.strftime("%Y%m%d-%H%M%S")


def is_place(directory: str) -> bool:
    """Whether it is one for runs, each below it, and not a run's own."""
    return (
        directory.endswith("/")
        if is_remote(directory)
        else directory.endswith(tuple(filter(None, (os.sep, os.altsep))))
    )


def _made(name: str) -> str:
    """Made at once: another run that starts in the same second gets another name."""
    number = 1
    while True:
        path = Path(name if number == 1 else f"{name}-{number}").expanduser()
        try:
            path.mkdir(parents=True)
            return str(path)
        except FileExistsError:
            number += 1
