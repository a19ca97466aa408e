"""The wheels that users install: with the C kernel where there is a compiler, and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.slow import cases, slow

ROOT = Path(__file__).parents[2]
KERNEL = "tbhooks/reduction/_kernel.so"
HOOKS = "tbhooks/capture/hooks/_eager_hooks.abi3.so"
BUILT_FROM = ("tbhooks", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")
PROGRAM = "from tbhooks.reduction import cpu; print(cpu.__file__, cpu.library is not None)"


def build(directory: Path, *, pure: bool) -> Path:
    """Builds a wheel from a copy of the sources: the build replaces the kernel, which other tests use."""
    source = directory / "source"
    for name in BUILT_FROM:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(origin, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(source)]
    subprocess.run(command, check=True, env=os.environ | {"TBHOOKS_PURE": str(int(pure))})
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    "pure", cases({"kernel": False, "pure": True}, always=["kernel"], reason="a second wheel takes as long to build")
)
def test_an_installed_wheel_has_the_kernel_unless_it_is_the_pure_one(pure: bool, tmp_path: Path) -> None:
    wheel = build(tmp_path, pure=pure)
    assert wheel.name.endswith("-py3-none-any.whl") == pure
    names = zipfile.ZipFile(wheel).namelist()
    assert (KERNEL in names) == (not pure)
    # Without Python.h there is a kernel and no hooks in C; a wheel with them is for CPython from 3.11 on.
    assert (HOOKS in names) == ("-cp311-abi3-" in wheel.name)
    assert (HOOKS in names) == (not pure and (Path(sysconfig.get_path("include")) / "Python.h").exists())
    assert "tbhooks/py.typed" in names
    assert any(name.startswith("tbhooks/plugin/static/") for name in names)
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(tmp_path / "site" / "tbhooks" / "reduction" / "cpu.py"), str(not pure)]


@slow(
    "installs torch into a venv of its own",
    covered_by="test_an_installed_wheel_has_the_kernel_unless_it_is_the_pure_one",
)
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.timeout(1200)
def test_a_wheel_in_an_empty_venv_has_the_kernel_and_runs_the_demo(tmp_path: Path) -> None:
    wheel = build(tmp_path, pure=False)
    venv.create(tmp_path / "venv", with_pip=True)
    python, alone = tmp_path / "venv" / "bin" / "python", {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    install = ["-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[demo]"]
    subprocess.run([python, *install], check=True, env=alone)
    done = subprocess.run([python, "-c", PROGRAM], cwd=tmp_path, env=alone, capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "True"
    assert str(tmp_path / "venv") in done.stdout
    demo = [tmp_path / "venv" / "bin" / "tbhooks", "demo", "--steps", "60"]
    done = subprocess.run(demo, cwd=tmp_path, env=alone, capture_output=True, text=True, check=True)
    assert "Update-to-weight ratio too high" in done.stdout
    check = [tmp_path / "venv" / "bin" / "tbhooks", "check", "runs/digits"]
    assert subprocess.run(check, cwd=tmp_path, env=alone, check=False).returncode == 0
