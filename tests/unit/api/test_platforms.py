"""A watch where Python lacks what only POSIX systems have, as on Windows. Simulated: no Windows runs this."""

from __future__ import annotations

from pathlib import Path

from tests.support.script_host import ScriptHost

SCRIPT = """
import os, signal, sys
import torch, torch._dynamo, torch.utils.tensorboard

del os.register_at_fork, os.fork, signal.SIGUSR1, signal.SIGKILL
sys.modules["resource"] = sys.modules["fcntl"] = None
import tbhooks

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tbhooks.watch(model, "run", every=1).progress().flight_recorder(steps=8) as w:
    for _ in range(3):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
assert w.stats.errors == 0, w.stats
assert len(tbhooks.runs.read("run").frames) == 3
"""


def test_a_system_without_fork_and_posix_signals_can_watch_and_read(scripts: ScriptHost, tmp_path: Path) -> None:
    done = scripts.run("-c", SCRIPT, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
