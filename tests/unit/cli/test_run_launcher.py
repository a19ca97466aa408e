"""A script under `tbhooks run` finds itself as under `python`, and ends as it would."""

from __future__ import annotations

import os
import py_compile
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

OURS = b"tbhooks: "
NOTHING = b"tbhooks: nothing was logged: the script did not import torch"
PROBE = """
import os, sys
main = sys.modules["__main__"]
print("argv", sys.argv, "path", sys.path[0], len(sys.path), os.getcwd())
print([(name, str(value)) for name, value in globals().items() if name in ("__name__", "__file__", "__package__")])
print(list(globals()), __doc__, __cached__, __annotations__, __builtins__)
print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent), vars(main) is globals(), main.__name__)
print(type(__loader__).__name__, getattr(__loader__, "name", None), getattr(__loader__, "path", None))
print([name for name in ("torch", "numpy", "tensorboard", "wrapt.nothing") if name in sys.modules])
"""


def run(directory: Path, *words: str, **variables: str) -> tuple[int, bytes, bytes]:
    ran = subprocess.run(
        [sys.executable, *words], cwd=directory, env={**os.environ, **variables}, capture_output=True, timeout=60,
        check=False,
    )  # fmt: skip
    return ran.returncode, ran.stdout, ran.stderr


def compare(directory: Path, *words: str, **variables: str) -> tuple[int, bytes, bytes]:
    """How it ended, after it was seen to end the same with and without us."""
    with ThreadPoolExecutor(2) as both:
        bare = both.submit(run, directory, *words, **variables)
        watched = both.submit(run, directory, "-m", "tbhooks", "run", *words, **variables)
    code, out, err = watched.result()
    theirs = b"".join(line for line in err.splitlines(keepends=True) if not line.startswith(OURS))
    assert (code, out, theirs) == bare.result()
    return code, out, err


@pytest.fixture
def place(tmp_path: Path) -> Path:
    package = tmp_path / "sub" / "package"
    package.mkdir(parents=True)
    for file in ("sub/probe.py", "sub/package/__main__.py", "sub/package/module.py"):
        (tmp_path / file).write_text(PROBE)
    (package / "__init__.py").touch()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(PROBE)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    (tmp_path / "link.py").symlink_to("sub/probe.py")
    py_compile.compile(str(tmp_path / "sub" / "probe.py"), str(tmp_path / "probe.pyc"))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("sub/probe.py", "--every", "3", "-m", "x"),
        ("./sub/../sub/probe.py",),
        ("link.py",),
        ("probe.pyc", "-v"),
        ("app", "a"),
        ("app.zip", "--", "a"),
        ("-m", "sub.package", "-m", "x"),
        ("-m", "sub.package.module", "--help"),
        ("-msub.probe", "a"),
    ],
    ids=" ".join,
)
def test_a_script_finds_itself_where_python_would_put_it(place: Path, words: tuple[str, ...]) -> None:
    code, out, err = compare(place, *words)
    assert code == 0
    assert out.endswith(b"[]\n")  # neither torch nor NumPy was loaded
    assert err.strip() == NOTHING


def test_the_search_path_is_left_alone_if_python_is_reported_to(place: Path) -> None:
    compare(place, "sub/probe.py", PYTHONSAFEPATH="1")


def test_an_absolute_path_is_as_good(place: Path) -> None:
    code, out, _ = compare(place, str(place / "sub" / "probe.py"))
    assert code == 0
    assert str(place / "sub" / "probe.py").encode() in out


@pytest.mark.parametrize("words", [("nowhere.py",), ("-m", "nowhere"), ("sub",), ("-m", "sub")], ids=" ".join)
def test_what_is_not_there_is_refused_as_python_does(place: Path, words: tuple[str, ...]) -> None:
    code, _, err = compare(place, *words)
    assert code == (2 if words == ("nowhere.py",) else 1)
    assert b"Traceback" not in err


THREADS = """
import threading, time
def late(): time.sleep(0.2); print("late")
def bad(): raise ValueError("in a thread")
threading.Thread(target=late).start()
threading.Thread(target=bad, name="bad").start()
"""
CHILD = """
import os
child = os.fork()
if child: os.waitpid(child, 0)
print(bool(child), flush=True)
"""
WORKERS = """
import multiprocessing
class Squared:
    def __init__(self, x): self.x = x * x
if __name__ == "__main__":
    with multiprocessing.get_context("{}").Pool(1) as pool: print([each.x for each in pool.map(Squared, range(3))])
"""
ENDINGS = {
    "at its end": ("print('done')", 0),
    "exit": ("import sys; sys.exit()", 0),
    "exit with a number": ("raise SystemExit(300)", 44),
    "exit with words": ("import sys; sys.exit('words')", 1),
    "exit with something": ("raise SystemExit((1, 2))", 1),
    "exit without a goodbye": ("import os; print('x', flush=True); os._exit(5)", 5),
    "no Python": ("def f(:\n  pass\n", 1),
    "an exception": ("def f(x):\n    return 1 / x\nprint(1)\nf(0)\n", 1),
    "one after another": ("try:\n    1 / 0\nexcept Exception as e:\n    raise ValueError('x') from e\n", 1),
    "a group": ("raise ExceptionGroup('g', [ValueError(1), KeyError('k')])", 1),
    "a hook of its own": ("import sys\nsys.excepthook = lambda *a: print('mine', a[0], a[2].tb_next)\n1 / 0\n", 1),
    "atexit": ("import atexit\natexit.register(print, 'bye')\natexit.register(print, 'good')\nraise SystemExit(4)", 4),
    "threads": (THREADS, 0),
    "Ctrl-C": ("import atexit\natexit.register(print, 'bye')\nraise KeyboardInterrupt", -signal.SIGINT),
    "a child of fork": (CHILD, 0),
    "workers by fork": (WORKERS.format("fork"), 0),
    "workers by spawn": (WORKERS.format("spawn"), 0),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_it_ends_as_under_python(tmp_path: Path, name: str) -> None:
    program, code = ENDINGS[name]
    (tmp_path / "script.py").write_text(program)
    ended, _, err = compare(tmp_path, "script.py")
    assert ended == code
    assert err.count(OURS) == (0 if "os._exit" in program else 1)  # and nothing from children
    assert b"tbhooks/running" not in err


def test_an_exception_of_a_module_shows_the_frames_that_python_shows(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import nothing_of_that_name\n")
    _, _, err = compare(tmp_path, "-m", "module")
    assert err.count(b"<frozen runpy>") == 2


def test_a_real_interrupt_ends_it_as_it_ends_python(tmp_path: Path) -> None:
    # Tests that run in the background inherit that SIGINT is ignored.
    handled = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "script.py").write_text(f"{handled}import time\nprint('here', flush=True)\ntime.sleep(30)\n")
    endings = []
    for words in ([], ["-m", "tbhooks", "run"]):
        process = subprocess.Popen(
            [sys.executable, *words, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        endings.append((process.returncode, [line for line in err.splitlines() if not line.startswith(OURS)]))
    assert endings[0] == endings[1]
    assert endings[0][0] == -signal.SIGINT


def test_the_command_is_the_same_as_the_module(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.path[0], sys.argv); sys.exit(7)")
    command = Path(sys.executable).parent / "tbhooks"
    ran = subprocess.run([command, "run", "script.py", "x"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (7, f"{tmp_path} ['script.py', 'x']\n".encode())
