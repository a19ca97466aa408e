"""A real TensorBoard on loopback, killed in the end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Serving:
    """Where it answers, past any proxy, and how to wait for what it has yet to load."""

    address: str
    opener: urllib.request.OpenerDirector
    wait_for: Callable[[Callable[[], Any]], Any]


@contextlib.contextmanager
def serving(directory: Path, load_fast: str, told: Path) -> Iterator[Serving]:
    """With either loader; what it says goes to the file `told`."""
    command = [
        sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--host", "127.0.0.1", "--port", "0",
        f"--load_fast={load_fast}", "--reload_interval=1",
    ]  # fmt: skip
    with told.open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait_for(ready: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and server.poll() is None:
            answer = ready()
            if answer:
                return answer
            time.sleep(0.1)
        raise AssertionError(f"TensorBoard did not get there; it said:\n{told.read_text()[-3000:]}")

    try:
        address = wait_for(lambda: re.search(r"http://127\.0\.0\.1:\d+", told.read_text()))[0]
        yield Serving(address, urllib.request.build_opener(urllib.request.ProxyHandler({})), wait_for)
    finally:
        server.kill()
        server.wait(10)
