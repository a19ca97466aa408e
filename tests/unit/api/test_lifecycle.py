"""How processes end, fork and die: whatever was handed over is on disk, and nobody hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tbhooks
import tbhooks.api.lifecycle
from tbhooks.sinks.jsonl import read
from tests.support import frames
from tests.support.processes import wait_until, without_torch_log

TIMEOUT_S = 60.0

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and fork")

# A busy machine must not drop steps here, so the queue of the script is as long as its run.
COMMON = """
import gc, os, signal, sys, time, weakref
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
import tbhooks, tbhooks.api.lifecycle, tbhooks.delivery.worker

tbhooks.delivery.worker.QUEUE_STEPS = 10_000
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests started in the background inherit that it is ignored
torch.set_num_threads(1)

def make():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(model, optimizer, data=None):
    optimizer.zero_grad()
    model(torch.randn(16, 4) if data is None else data).square().mean().backward()
    optimizer.step()

def wait_for(child):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"
"""


# Imports what scripts need once, then forks a process for each, before any thread or watch exists: a script
# runs as the main module of a process of its own, a fraction of a second after its start instead of three.
HOST = """
import gc, os, runpy, sys
import torch, torch._dynamo, tbhooks.api.watch, tbhooks.sinks.tensorboard, tbhooks.sinks.jsonl
import torch.utils.data, torch.utils.tensorboard

torch.optim.SGD([torch.zeros(1)], lr=0.1)
gc.freeze()
for line in sys.stdin:
    directory = line.rstrip()
    child = os.fork()
    if child == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(os.path.join(directory, "status.part"), "w") as file:
        file.write(str(status))
    os.rename(file.name, os.path.join(directory, "status"))
else:
    sys.exit()

os.setsid()
os.chdir(directory)
for number, name in enumerate((os.devnull, "out", "err")):
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.dup2(file, number)
    os.close(file)
with open("pid.part", "w") as file:
    file.write(str(os.getpid()))
os.rename("pid.part", "pid")
runpy.run_path("script.py", run_name="__main__")
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tbhooks.__file__).parents[1])}


def wait_for(ready: Callable[[], Any], patience_s: float = TIMEOUT_S) -> Any:
    return wait_until(ready, patience_s, pause_s=0.005)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    path = tmp_path_factory.mktemp("host") / "host.py"
    path.write_text(HOST)
    process = subprocess.Popen(
        [sys.executable, "-u", str(path)], env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    yield process
    process.kill()
    process.communicate(timeout=10)


@dataclass
class Script:
    """A script in a directory of its own, and what it left there."""

    host: subprocess.Popen[str]
    directory: Path

    @property
    def run_directory(self) -> Path:
        return self.directory / "run"

    def run(self, body: str) -> tuple[int, str, str]:
        """Exit status, standard output and error."""
        self._start(body)
        return self._finish()

    def run_fresh(self, body: str) -> tuple[int, str, str]:
        """The same in an interpreter of its own from the start."""
        self._write(body)
        done = subprocess.run(
            [sys.executable, "script.py"], cwd=self.directory, env=ENVIRONMENT, text=True, timeout=TIMEOUT_S,
            check=False, stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        return done.returncode, done.stdout, without_torch_log(done.stderr)

    def interrupt(self, body: str, number: signal.Signals, after_lines: int = 10) -> tuple[int, list[str], str]:
        """Sends a signal once the script has printed that many lines; its exit status, all lines, its errors."""
        pid = self._start(body)
        if wait_for(lambda: self._text("out").count("\n") >= after_lines or self._text("status")):
            os.kill(pid, number)
        status, out, err = self._finish()
        return status, out.splitlines(), err

    def steps(self, tag: str = "activation.std/0") -> list[int]:
        """Logged steps in the event file, in the order they were written."""
        return [point.step for point in frames.accumulator(self.run_directory).Scalars(tag)]

    def _write(self, body: str) -> None:
        (self.directory / "script.py").write_text(COMMON + body)

    def _start(self, body: str) -> int:
        self._write(body)
        assert self.host.stdin
        self.host.stdin.write(f"{self.directory}\n")
        self.host.stdin.flush()
        return int(wait_for(lambda: self._text("pid")))

    def _finish(self) -> tuple[int, str, str]:
        hung = not wait_for(lambda: self._text("status"))
        with contextlib.suppress(ProcessLookupError):  # whatever it started and left behind goes with it
            os.killpg(int(self._text("pid")), signal.SIGKILL)
        assert not hung, f"the script hung; it had said {self._text('out')!r} and {self._text('err')!r}"
        return int(self._text("status")), self._text("out"), without_torch_log(self._text("err"))

    def _text(self, name: str) -> str:
        path = self.directory / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def script(host: subprocess.Popen[str], tmp_path: Path) -> Script:
    return Script(host, tmp_path)


# A loop that says how many steps have ended and goes on until it is stopped.
ENDLESS = """
model, optimizer = make()
tbhooks.watch(model, SummaryWriter("run"), every=1)
for ended in range(1, 5000):
    train_step(model, optimizer)
    print(ended)
    time.sleep(0.005)
"""


# --- The end of a script ------------------------------------------------------------------------------


def test_one_line_and_no_close_loses_nothing_and_prints_nothing(script: Script) -> None:
    status, out, err = script.run_fresh("""
model, optimizer = make()
tbhooks.watch(model, SummaryWriter("run"), every=2)
for _ in range(21):
    train_step(model, optimizer)
""")
    assert (status, out, err) == (0, "", "")
    assert script.steps() == list(range(0, 21, 2))
    assert script.steps("update.ratio/2.weight") == list(range(0, 21, 2))
    assert len(frames.event_files(script.run_directory)) == 1


def test_a_single_step_is_there_at_exit(script: Script) -> None:
    status, out, err = script.run("""
model, optimizer = make()
tbhooks.watch(model, "run", every=100)
train_step(model, optimizer)
""")
    assert (status, out, err) == (0, "", "")
    assert script.steps() == [0]


def test_a_watch_in_every_style_prints_nothing(script: Script) -> None:
    status, out, err = script.run("""
model, optimizer = make()
with SummaryWriter("run") as writer, tbhooks.watch(model, [writer, tbhooks.JsonlSink("run/f.jsonl")], every=1) as w:
    for step in range(5):
        train_step(model, optimizer)
        w.log({"loss": torch.tensor(float("nan")), "lr": 0.1})
        w.step(step * 10)
    w.flush()
    assert w.latest.step == 40 and w.stats.dropped == 0
    repr(w), w.findings
del w
tbhooks.watch(model, every=1)
train_step(model, optimizer)
tbhooks.unwatch(model)
""")
    assert (status, out, err) == (0, "", "")
    assert script.steps("train/loss") == [0, 10, 20, 30, 40]
    assert [frame.step for frame in read(script.run_directory / "f.jsonl")] == [0, 10, 20, 30, 40]


FAILING = """
class Failing:
    def write(self, frame):
        raise OSError("unplugged")
    def flush(self): pass
    def close(self): pass

model, optimizer = make()
tbhooks.watch(model, Failing(), every=1)
for _ in range(3):
    train_step(model, optimizer)
"""


def test_trouble_is_not_printed_either(script: Script) -> None:
    assert script.run(FAILING) == (0, "", "")


def test_problems_are_logged_once(script: Script) -> None:
    status, out, err = script.run('import logging; logging.basicConfig(format="%(name)s: %(message)s")' + FAILING)
    assert (status, out) == (0, "")
    assert err.splitlines() == [
        "tbhooks: Failing: OSError: unplugged",
        "tbhooks: a logged step was dropped: every sink failed to write it",
    ]


def test_a_tensorboardx_writer_loses_nothing_at_exit(script: Script) -> None:
    pytest.importorskip("tensorboardX")
    status, out, _ = script.run("""
import tensorboardX
model, optimizer = make()
tbhooks.watch(model, tensorboardX.SummaryWriter("run"), every=1)
for _ in range(30):
    train_step(model, optimizer)
""")
    assert (status, out) == (0, "")
    assert script.steps() == list(range(30))


def test_an_uncaught_exception_loses_no_step_that_had_ended(script: Script) -> None:
    status, out, err = script.run("""
model, optimizer = make()
tbhooks.watch(model, SummaryWriter("run"), every=1)
for step in range(12):
    train_step(model, optimizer)
raise KeyError("the user's own mistake")
""")
    assert (status, out) == (1, "")
    assert err.endswith("""KeyError: "the user's own mistake"\n""")
    assert "tbhooks" not in err
    assert script.steps() == list(range(12))


def test_an_exception_in_the_middle_of_a_step_shows_the_step_as_far_as_it_came(script: Script) -> None:
    status, _, err = script.run("""
model, optimizer = make()
tbhooks.watch(model, SummaryWriter("run"), every=1)
for step in range(5):
    train_step(model, optimizer)
model(torch.randn(16, 4))
model(torch.randn(16, 5))
""")
    assert status == 1
    assert "mat1 and mat2 shapes cannot be multiplied" in err
    assert script.steps() == [0, 1, 2, 3, 4, 5]
    assert script.steps("update.ratio/0.weight") == [0, 1, 2, 3, 4]


def test_sys_exit_keeps_its_code(script: Script) -> None:
    status, out, err = script.run("""
model, optimizer = make()
tbhooks.watch(model, SummaryWriter("run"), every=1)
for step in range(7):
    train_step(model, optimizer)
sys.exit(3)
""")
    assert (status, out, err) == (3, "", "")
    assert script.steps() == list(range(7))


def test_a_slow_sink_is_waited_for_at_exit(script: Script) -> None:
    status, _, err = script.run("""
class Slow(tbhooks.JsonlSink):
    def write(self, frame):
        time.sleep(0.2)
        super().write(frame)

model, optimizer = make()
tbhooks.watch(model, Slow("run/f.jsonl"), every=1)
for step in range(6):
    train_step(model, optimizer)
""")
    assert (status, err) == (0, "")
    assert [frame.step for frame in read(script.run_directory / "f.jsonl")] == list(range(6))


# Watches whose sinks never return, and one whose sink works. Prints how long each wait for a pump may take.
HUNG = """
class Hung(tbhooks.MemorySink):
    def write(self, frame):
        time.sleep(100)

def wait(pump, timeout_s):
    print("wait", timeout_s, flush=True)
    return stock_wait(pump, timeout_s)

stock_wait, tbhooks.delivery.worker.Worker.wait = tbhooks.delivery.worker.Worker.wait, wait
sys.modules["tbhooks.api.lifecycle"].EXIT_DEADLINE_S = sys.modules["tbhooks.api.lifecycle"].SIGTERM_DEADLINE_S = 1.5
watched = []
for sink in [Hung(), Hung(), Hung(), tbhooks.JsonlSink("run/f.jsonl"), Hung()]:
    model, optimizer = make()
    watched.append((tbhooks.watch(model, sink, every=1), model, optimizer))
    for _ in range(3):
        train_step(model, optimizer)
"""


def check_one_deadline(script: Script, lines: list[str]) -> None:
    waits = [float(line.split()[1]) for line in lines if line.startswith("wait")]
    assert len(waits) == 5
    assert waits[0] <= 1.5
    # A wait for a hung sink takes as long as it may, so the times left can only shrink.
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < 0.5
    assert [frame.step for frame in read(script.run_directory / "f.jsonl")] == [0, 1, 2]


def test_all_watches_share_one_deadline_at_exit_and_a_hung_one_costs_the_others_nothing(script: Script) -> None:
    status, out, err = script.run(HUNG)
    assert (status, err) == (0, "")
    check_one_deadline(script, out.splitlines())


def test_all_watches_share_one_deadline_at_sigterm(script: Script) -> None:
    status, lines, err = script.interrupt(HUNG + "print('ready', flush=True)\ntime.sleep(50)\n", signal.SIGTERM, 1)
    assert (status, err) == (-signal.SIGTERM, "")
    check_one_deadline(script, lines)


def test_the_time_at_sigterm_is_well_below_what_is_usual_before_sigkill() -> None:
    assert tbhooks.api.lifecycle.SIGTERM_DEADLINE_S <= 5


def test_unwatch_gives_all_watches_of_a_model_one_deadline(script: Script) -> None:
    status, out, err = script.run(
        HUNG.split("watched = []", maxsplit=1)[0]
        + """
tbhooks.api.lifecycle.close_together.__defaults__ = (1.5,)
model, optimizer = make()
for sink in [Hung(), Hung(), Hung()]:
    tbhooks.watch(model, sink, every=1)
train_step(model, optimizer)
tbhooks.unwatch(model)
"""
    )
    waits = [float(line.split()[1]) for line in out.splitlines()]
    assert (status, err, len(waits)) == (0, "", 3)
    assert waits == sorted(waits, reverse=True)
    assert waits[0] <= 1.5
    assert waits[-1] < 0.5


def test_a_new_watch_does_not_wait_for_the_hung_sink_of_a_model_that_is_gone(script: Script) -> None:
    status, out, err = script.run(
        HUNG.replace('[Hung(), Hung(), Hung(), tbhooks.JsonlSink("run/f.jsonl"), Hung()]', "[Hung()]")
        + """
w = watched[0][0]
del watched, model, optimizer
gc.collect()
model, optimizer = make()
tbhooks.watch(model, every=1).close()
print("closed", w._lifecycle in tbhooks.api.lifecycle.open_watches)
os._exit(0)
"""
    )
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["wait", "closed"]


# --- Signals ------------------------------------------------------------------------------------------


def check_kept(script: Script, lines: list[str]) -> None:
    """All steps that had ended, in order, and at most the one that was open."""
    ended, kept = int(lines[-1]), script.steps()
    assert ended >= 10
    assert kept in (list(range(ended)), list(range(ended + 1)), list(range(ended + 2)))


def test_ctrl_c_in_the_loop_loses_no_step_that_had_ended(script: Script) -> None:
    status, lines, err = script.interrupt(ENDLESS, signal.SIGINT)
    assert status == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt\n")
    check_kept(script, lines)


def test_sigterm_loses_no_step_that_had_ended_and_the_process_dies_of_it(script: Script) -> None:
    status, lines, err = script.interrupt(ENDLESS, signal.SIGTERM)
    assert status == -signal.SIGTERM
    assert not err
    check_kept(script, lines)


def test_sigterm_waits_for_what_a_slow_sink_still_has_to_write(script: Script) -> None:
    status, _, _ = script.interrupt(
        """
class Slow(tbhooks.JsonlSink):
    def write(self, frame):
        time.sleep(0.1)
        super().write(frame)

model, optimizer = make()
tbhooks.watch(model, Slow("run/f.jsonl"), every=1)
for ended in range(1, 13):
    train_step(model, optimizer)
    print(ended)
time.sleep(30)
""",
        signal.SIGTERM,
        after_lines=12,
    )
    assert status == -signal.SIGTERM
    assert [frame.step for frame in read(script.run_directory / "f.jsonl")][:12] == list(range(12))


def test_sigterm_while_the_user_is_inside_the_writer_is_not_a_deadlock(script: Script) -> None:
    """The main thread holds the writer's own lock when the signal comes, so the pump cannot write."""
    status, lines, _ = script.interrupt(
        """
sys.modules["tbhooks.api.lifecycle"].SIGTERM_DEADLINE_S = 1.0
model, optimizer = make()
writer = SummaryWriter("run")
tbhooks.watch(model, writer, every=1)
train_step(model, optimizer)
writer.flush()
train_step(model, optimizer)
with writer.file_writer.event_writer._async_writer._lock:
    print("inside")
    time.sleep(50)
""",
        signal.SIGTERM,
        after_lines=1,
    )
    assert (status, lines) == (-signal.SIGTERM, ["inside"])
    assert script.steps()[:1] == [0]


def test_sigterm_during_close_loses_nothing_either(script: Script) -> None:
    status, _, _ = script.interrupt(
        """
class Slow(tbhooks.JsonlSink):
    def write(self, frame):
        time.sleep(0.1)
        super().write(frame)

model, optimizer = make()
w = tbhooks.watch(model, Slow("run/f.jsonl"), every=1)
for ended in range(1, 13):
    train_step(model, optimizer)
print("closing")
w.close()
""",
        signal.SIGTERM,
        after_lines=1,
    )
    assert status in (0, -signal.SIGTERM)
    assert [frame.step for frame in read(script.run_directory / "f.jsonl")] == list(range(12))


def test_a_users_own_sigterm_handler_is_left_alone(script: Script) -> None:
    status, lines, err = script.interrupt(
        "def mine(*_): sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, mine)\n"
        + ENDLESS.replace("for ended", "assert signal.getsignal(signal.SIGTERM) is mine\nfor ended"),
        signal.SIGTERM,
    )
    assert (status, err) == (7, "")
    check_kept(script, lines)


def test_ignored_sigterm_stays_ignored(script: Script) -> None:
    status, _, err = script.interrupt(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENDLESS.replace("5000", "31"), signal.SIGTERM
    )
    assert (status, err) == (0, "")
    assert script.steps() == list(range(30))


@pytest.mark.parametrize("writer", ["'run'", "SummaryWriter('run')", "__import__('tensorboardX').SummaryWriter('run')"])
def test_sigkill_loses_no_step_that_the_background_thread_has_written(script: Script, writer: str) -> None:
    if "tensorboardX" in writer:
        pytest.importorskip("tensorboardX")
    status, _, err = script.run(f"""
from tensorboard.summary.writer.record_writer import RecordWriter
stock = RecordWriter.write
RecordWriter.write = lambda *given: (time.sleep(0.01), stock(*given))  # a busy machine
model, optimizer = make()
w = tbhooks.watch(model, {writer}, every=1)
for _ in range(30):
    train_step(model, optimizer)
w._session.settle()
w._worker.wait()
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert (status, err) == (-signal.SIGKILL, "")
    assert script.steps() == list(range(30))


# --- Forks and workers --------------------------------------------------------------------------------


def test_a_forked_child_neither_hangs_nor_writes_and_the_parent_is_complete(script: Script) -> None:
    status, out, err = script.run("""
model, optimizer = make()
w = tbhooks.watch(model, [SummaryWriter("run"), tbhooks.JsonlSink("run/f.jsonl")], every=1)
for _ in range(5):
    train_step(model, optimizer)
children = []
for how in ("exit", "_exit"):
    child = os.fork()
    if child == 0:
        for _ in range(5):
            train_step(model, optimizer)
        w.close()
        w.close()
        sys.exit(4) if how == "exit" else os._exit(4)
    children.append(child)
for _ in range(5):
    train_step(model, optimizer)
print([wait_for(child) for child in children])
""")
    assert (status, out, err) == (0, "[4, 4]\n", "")
    assert script.steps() == list(range(10))
    assert [frame.step for frame in read(script.run_directory / "f.jsonl")] == list(range(10))
    assert len(frames.event_files(script.run_directory)) == 1


def test_a_child_forked_in_the_middle_of_a_logged_step_trains_on_unwatched(script: Script) -> None:
    status, out, err = script.run("""
model, optimizer = make()
w = tbhooks.watch(model, tbhooks.JsonlSink("run/f.jsonl"), every=1)
train_step(model, optimizer)
output = model(torch.randn(16, 4))
assert any(module._forward_hooks for module in model.modules())
child = os.fork()
if child == 0:
    assert not any(module._forward_hooks for module in model.modules())
    output.square().mean().backward()
    optimizer.step()
    for _ in range(3):
        train_step(model, optimizer)
    w.log({"loss": 1.0})
    sys.exit(5)
output.square().mean().backward()
optimizer.step()
train_step(model, optimizer)
print(wait_for(child))
""")
    assert (status, out, err) == (0, "5\n", "")
    assert [frame.step for frame in read(script.run_directory / "f.jsonl")] == [0, 1, 2]


def test_a_forked_child_stays_without_hooks(script: Script) -> None:
    status, out, err = script.run("""
model, optimizer = make()
tbhooks.watch(model, tbhooks.JsonlSink("run/f.jsonl"), every=1)
train_step(model, optimizer)
child = os.fork()
if child == 0:
    for _ in range(3):
        train_step(model, optimizer)
    os._exit(sum(len(module._forward_hooks) for module in model.modules()))
print(wait_for(child))
""")
    assert (status, out, err) == (0, "0\n", "")


def test_a_child_forked_while_the_pump_is_busy_does_not_hang(script: Script) -> None:
    status, out, err = script.run("""
class Slow(tbhooks.JsonlSink):
    def write(self, frame):
        time.sleep(0.02)
        super().write(frame)

model, optimizer = make()
w = tbhooks.watch(model, Slow("run/f.jsonl"), every=1)
said = []
for _ in range(10):
    train_step(model, optimizer)
    child = os.fork()
    if child == 0:
        train_step(model, optimizer)
        w.close()
        os._exit(0)
    said.append(wait_for(child))
print(said)
""")
    assert (status, out, err) == (0, f"{[0] * 10}\n", "")
    assert [frame.step for frame in read(script.run_directory / "f.jsonl")] == list(range(10))


def test_a_child_may_start_a_watch_of_its_own(script: Script) -> None:
    status, out, err = script.run("""
model, optimizer = make()
tbhooks.watch(model, tbhooks.JsonlSink("run/f.jsonl"), every=1)
train_step(model, optimizer)
child = os.fork()
if child == 0:
    tbhooks.watch(model, tbhooks.JsonlSink("run/child.jsonl"), every=1)
    for _ in range(3):
        train_step(model, optimizer)
    sys.exit(0)
print(wait_for(child))
train_step(model, optimizer)
""")
    assert (status, out, err) == (0, "0\n", "")
    assert [frame.step for frame in read(script.run_directory / "child.jsonl")] == [0, 1, 2]
    assert [frame.step for frame in read(script.run_directory / "f.jsonl")] == [0, 1]


def test_data_loader_workers_by_fork_disturb_nothing(script: Script) -> None:
    status, out, err = script.run("""
from torch.utils.data import DataLoader, TensorDataset
torch.multiprocessing.set_start_method("fork")
model, optimizer = make()
tbhooks.watch(model, SummaryWriter("run"), every=1)
for epoch in range(2):
    for data, in DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=16, num_workers=2):
        train_step(model, optimizer, data)
""")
    assert (status, out, err) == (0, "", "")
    assert script.steps() == list(range(12))
    assert len(frames.event_files(script.run_directory)) == 1


def test_a_spawned_process_gets_the_model_and_none_of_the_watch(script: Script) -> None:
    status, out, err = script.run_fresh("""
def work(model, results):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, optimizer)
    results.put(len(tbhooks.api.lifecycle.open_watches))

if __name__ == "__main__":
    import torch.multiprocessing as mp
    context = mp.get_context("spawn")
    model, optimizer = make()
    tbhooks.watch(model, SummaryWriter("run"), every=1)
    for _ in range(3):
        train_step(model, optimizer)
    assert any(module._forward_hooks for module in model.modules())
    results = context.Queue()
    process = context.Process(target=work, args=(model, results))
    process.start()
    watches = results.get(timeout=40)
    process.join(20)
    train_step(model, optimizer)
    print(process.exitcode, watches)
""")
    assert (status, out) == (0, "0 0\n"), err
    assert not err
    assert script.steps() == [0, 1, 2, 3]
    assert len(frames.event_files(script.run_directory)) == 1


# --- The end of a model -------------------------------------------------------------------------------


def test_a_model_that_is_gone_is_freed_and_its_watch_closed_with_the_data_written(script: Script) -> None:
    status, out, err = script.run("""
model, optimizer = make()
w = tbhooks.watch(model, "run", every=1)
for _ in range(4):
    train_step(model, optimizer)
reference = weakref.ref(model)
weight = weakref.ref(model[0].weight)
optimizer.zero_grad()
del model, optimizer
gc.collect()
print(reference() is None, weight() is None)
w.flush()
w.log({"loss": 1.0})
w.close()
print(len(w.history), w.stats.errors, w.stats.dropped)
os._exit(0)  # no exit handler helps: it is on disk by now, or lost
""")
    assert (status, out, err) == (0, "True True\n4 0 0\n", "")
    assert script.steps() == [0, 1, 2, 3]


def test_many_models_come_and_go(script: Script) -> None:
    status, out, err = script.run("""
import threading
for number in range(20):
    model, optimizer = make()
    tbhooks.watch(model, f"run/{number}", every=1)
    for _ in range(2):
        train_step(model, optimizer)
del model, optimizer
gc.collect()
tbhooks.watch(nn.Linear(1, 1)).close()
deadline = time.monotonic() + 10
while threading.active_count() > 1 and time.monotonic() < deadline:
    time.sleep(0.01)
print([thread.name for thread in threading.enumerate()])
""")
    assert (status, out, err) == (0, "['MainThread']\n", "")
    for number in range(20):
        series = frames.scalar_series(script.run_directory / str(number), "activation.std/0")
        assert sorted(series) == [0, 1]
