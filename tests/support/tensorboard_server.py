"""A real TensorBoard process on loopback, which is killed in the end, and what it answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

PATIENCE_S = 120.0


@dataclass
class Reply:
    """One answer of the server."""

    status: int
    headers: Any
    content: bytes

    @property
    def json(self) -> Any:
        assert self.status == 200, self.content
        return json.loads(self.content, parse_constant=pytest.fail)

    @property
    def matrix(self) -> tuple[dict[str, Any], NDArray[np.float32]]:
        """The plugin's binary answer: a header, and a matrix of steps and sites."""
        assert self.status == 200, self.content
        length = int.from_bytes(self.content[:4], "little")
        header = json.loads(self.content[4 : 4 + length], parse_constant=pytest.fail)
        return header, np.frombuffer(self.content[4 + length :], "<f4").reshape(len(header["steps"]), header["sites"])


class Server:
    """TensorBoard over `directory`; what it prints goes to the file `log`. A context manager."""

    def __init__(self, directory: Path, log: Path, *flags: str) -> None:
        self.directory, self._log = directory, log
        self.fast = "--load_fast=true" in flags
        command = [
            sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--host", "127.0.0.1", "--port", "0",
            "--reload_interval=1", *flags,
        ]  # fmt: skip
        with log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> Self:
        try:
            self.address = self.wait_for(lambda: re.search(r"http://127\.0\.0\.1:\d+[^ ]*(?=/ )", self.output))[0]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def wait_for(self, ready: Callable[[], Any]) -> Any:
        """What `ready` answers once that is true."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            answer = ready()
            if answer:
                return answer
            time.sleep(0.1)
        raise AssertionError(f"TensorBoard did not get there. It printed:\n{self.output[-3000:]}")

    def get(self, path: str, /, **parameters: object) -> Reply:
        query = "?" + urllib.parse.urlencode(parameters) if parameters else ""
        try:
            with self.opener.open(f"{self.address}/data/{path}{query}", timeout=30) as answer:
                return Reply(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as refused:
            return Reply(refused.code, refused.headers, refused.read())

    def ask(self, route: str, /, **parameters: object) -> Reply:
        """One of the plugin's own routes."""
        return self.get(f"plugin/tbhooks/{route}", **parameters)

    def tab(self) -> dict[str, Any]:
        """How TensorBoard lists the plugin's tab."""
        listed: dict[str, Any] = self.get("plugins_listing").json["tbhooks"]
        return listed

    def newest(self) -> dict[str, int]:
        """The last step of each run that the plugin knows."""
        return {run["name"]: run["last_step"] for run in self.ask("runs").json["runs"]}
