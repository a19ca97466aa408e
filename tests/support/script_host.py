"""Scripts, modules and programs as `python` runs them, in processes that have imported torch already.

One process imports torch, which takes more than a second, and forks the others. A script finds the interpreter as it
is at its start: tests/unit/test_support.py compares. Two things differ: torch is in sys.modules, so what depends on
when torch is imported needs a process of its own; and variables that torch reads when it is imported are those of the
tests. tbhooks is not imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOST = """
import sys
sys.path.insert(0, {root!r})
from tests.support import script_host
del sys.path[0]
main = script_host.serve()
# A child. What is left of this program is what Python does at the end of any other.
del sys.modules["tests.support.script_host"], sys.modules["tests.support"], sys.modules["tests"]
main()
"""


class ScriptHost:
    """Runs what follows `python` on a command line."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        self._host = subprocess.Popen(
            [sys.executable, "-c", HOST.format(root=root)], stdin=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(
        self, *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` does with captured output; kills the process and what it started if it takes too long."""
        with tempfile.TemporaryDirectory() as name:
            directory, given = Path(name), [str(word) for word in words]
            order = {
                "words": given, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env),
                "directory": name,
            }  # fmt: skip
            assert self._host.stdin is not None
            self._host.stdin.write((json.dumps(order) + "\n").encode())
            self._host.stdin.flush()
            deadline = time.monotonic() + timeout
            while not (directory / "status").exists():
                assert self._host.poll() is None, "the process that forks scripts has died"
                if time.monotonic() > deadline:
                    if (directory / "pid").exists():
                        os.killpg(int((directory / "pid").read_text()), signal.SIGKILL)
                    raise subprocess.TimeoutExpired(given, timeout)
                time.sleep(0.01)
            out, err = ((directory / stream).read_bytes().decode() for stream in ("out", "err"))
            return subprocess.CompletedProcess(given, int((directory / "status").read_text()), out, err)

    def close(self) -> None:
        self._host.kill()
        self._host.wait()


# In the process that forks. ---------------------------------------------------------------------------------------


def serve() -> Any:
    """Forks a process for each line of standard input, in which it returns what is to be run."""
    import gc

    import torch._dynamo  # the first optimizer would import it
    import torch.utils.data
    import torch.utils.tensorboard  # noqa: F401

    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    search = [place for place in sys.path[1:] if place not in own]
    gc.freeze()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if os.fork() == 0:
            child = os.fork()
            if child == 0:
                _become(order, search)
                return lambda: _main(order["words"])
            _wait(child, Path(order["directory"]))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)


def _wait(child: int, directory: Path) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(FileNotFoundError):  # nobody waits any more
        (directory / "status.part").write_text(str(status))
        (directory / "status.part").rename(directory / "status")
    os._exit(0)


def _become(order: dict[str, Any], search: list[str]) -> None:
    """Gives the process what it would have had from the start: streams, directory, environment, search path."""
    import torch

    os.setsid()
    directory = Path(order["directory"])
    (directory / "pid.part").write_text(str(os.getpid()))
    (directory / "pid.part").rename(directory / "pid")
    for number, place in enumerate((Path(os.devnull), directory / "out", directory / "err")):
        file = os.open(place, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    first, *others = order["words"]
    added = [place for place in order["env"].get("PYTHONPATH", "").split(os.pathsep) if place]
    start = {"-c": "", "-m": order["cwd"]}.get(first, os.path.dirname(os.path.realpath(first)))
    sys.path[:] = [start, *added, *search]
    sys.path_importer_cache.clear()
    torch.default_generator.seed()
    sys.orig_argv[1:] = order["words"]
    sys.argv[:] = [first, *others[1:]] if first in ("-c", "-m") else [first, *others]


def _main(words: list[str]) -> None:
    """Runs it as the main module. An exception is shown without the frames of this file."""
    import runpy
    from importlib.machinery import BuiltinImporter, SourceFileLoader
    from types import ModuleType

    main: Any = ModuleType("__main__")
    main.__builtins__ = __builtins__
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    failure: BaseException | None = None
    try:
        if words[0] == "-m":
            runpy._run_module_as_main(words[1])
        elif words[0] == "-c":
            main.__loader__ = BuiltinImporter
            exec(compile(words[1], "<string>", "exec"), vars(main))
        else:
            main.__file__, main.__cached__ = os.path.abspath(words[0]), None
            main.__loader__ = SourceFileLoader("__main__", main.__file__)
            exec(compile(Path(words[0]).read_bytes(), main.__file__, "exec"), vars(main))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as problem:
        failure = problem
    if failure is not None:
        assert failure.__traceback__ is not None
        failure.__traceback__ = failure.__traceback__.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(failure), failure, failure.__traceback__
        sys.excepthook(type(failure), failure, failure.__traceback__)
        raise SystemExit(1)
