"""Real processes with a gloo group between them, started fast and never left hanging.

One process imports torch and forks the ranks of every run, which takes them a fraction of a second. A run has a time
limit; what is still alive then is killed, and says so.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 90.0
# How long a rank waits for another in a collective, unless a run says otherwise.
PATIENCE_S = 30.0

HOST = """
import sys
sys.path.insert(0, {root!r})
from tests.support import process_pool
process_pool.serve()
"""


@dataclass(frozen=True)
class Rank:
    """How one rank ended: its exit code (negative: the signal), what its function returned, what it printed."""

    status: int | None
    value: Any
    output: str


class ProcessPool:
    """Runs functions in as many ranks as wanted."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        self._host = subprocess.Popen(
            [sys.executable, "-c", HOST.format(root=root)], stdin=subprocess.PIPE, env=environment, cwd=root
        )

    def run(
        self, function: Callable[..., Any], world: int, directory: Path, *args: Any,
        limit_s: float = LIMIT_S, patience_s: float = PATIENCE_S,
    ) -> list[Rank]:  # fmt: skip
        """`function(rank, *args)` in each, with the directory as working directory. Kills what does not end."""
        directory.mkdir(parents=True, exist_ok=True)
        order = (function.__module__, function.__qualname__, world, str(directory), args, limit_s, patience_s)
        (directory / "order.part").write_bytes(pickle.dumps(order))
        (directory / "order.part").rename(directory / "order")
        assert self._host.stdin is not None
        self._host.stdin.write(f"{directory}\n".encode())
        self._host.stdin.flush()
        deadline = time.monotonic() + limit_s + 60
        while not (directory / "done").exists():
            assert self._host.poll() is None, "the process that forks the ranks has died"
            assert time.monotonic() < deadline, "the process that forks the ranks hangs"
            time.sleep(0.01)
        return [_read(directory, rank) for rank in range(world)]

    def values(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The same, where all have to end well."""
        ranks = self.run(*args, **kwargs)
        for number, rank in enumerate(ranks):
            assert rank.status == 0, f"rank {number} ended with {rank.status}:\n{rank.output[-3000:]}"
        return [rank.value for rank in ranks]

    def close(self) -> None:
        self._host.kill()
        self._host.wait()


def _read(directory: Path, rank: int) -> Rank:
    status = (directory / f"status-{rank}").read_text()
    value = directory / f"value-{rank}"
    output = (directory / f"output-{rank}").read_text(errors="replace")
    returned = pickle.loads(value.read_bytes()) if value.exists() else None
    return Rank(None if status == "killed" else int(status), returned, output)


# In the process that forks. ---------------------------------------------------------------------------------------


def serve() -> None:
    """Runs what is asked for on standard input, one directory a line.

    What ranks need is imported here, once: torch._dynamo, which the first optimizer imports, takes each of them a
    second. No watch and no thread may exist here.
    """
    import gc

    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.utils.tensorboard  # noqa: F401

    import tbhooks.api.watch
    import tbhooks.sinks.tensorboard  # noqa: F401
    import tests.support.jobs  # noqa: F401

    gc.freeze()
    for line in sys.stdin:
        directory = Path(line.rstrip())
        if os.fork() == 0:  # of its own, so that several runs may be on their way
            _run(directory)
            os._exit(0)


def _run(directory: Path) -> None:
    module, name, world, _, args, limit_s, patience_s = pickle.loads((directory / "order").read_bytes())
    children: dict[int, int] = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _be(rank, world, directory, module, name, args, patience_s)
        children[child] = rank
    killer = threading.Timer(limit_s, lambda: [os.kill(child, 9) for child in list(children)])
    killer.start()
    started = time.monotonic()
    while children:
        child, status = os.wait()
        killed = time.monotonic() - started >= limit_s
        rank = children.pop(child)
        (directory / f"status-{rank}").write_text("killed" if killed else str(os.waitstatus_to_exitcode(status)))
    killer.cancel()
    (directory / "done").touch()


def _be(rank: int, world: int, directory: Path, module: str, name: str, args: Any, patience_s: float) -> None:
    """One rank, as the main program of its process."""
    import importlib
    import traceback
    from datetime import timedelta

    import torch

    import tbhooks.api.lifecycle

    os.chdir(directory)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    output = os.open(f"output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    tbhooks.api.lifecycle.MERGED_READ_S = 20.0  # a busy machine may keep a rank from running for seconds
    status = 0
    try:
        store = torch.distributed.FileStore(str(directory / "store"), world)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience_s)
        )
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        value = function(rank, *args)
        part = directory / f"value-{rank}.part"
        part.write_bytes(pickle.dumps(value))
        part.rename(directory / f"value-{rank}")
    except SystemExit as problem:
        status = problem.code if isinstance(problem.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    _end(status)


def _end(status: int) -> None:
    """As an interpreter ends: what is registered for that runs, then the process is gone."""
    import atexit
    import threading as threads

    sys.stdout.flush()
    threads._shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)
