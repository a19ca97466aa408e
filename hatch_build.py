"""Builds the C kernel and the hooks in C into the package where there is a compiler; without one it is pure Python."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# -fopenmp-simd needs no runtime: it only lets marked loops add up in several lanes.
FLAGS = ("-O3", "-fopenmp-simd", "-fPIC", "-shared")
SOURCE, LIBRARY = Path("tbhooks/reduction/kernel.c"), Path("tbhooks/reduction/_kernel.so")
# For CPython's stable ABI: one file for every version from 3.11 on. Its Python.h must be there to compile it.
HOOKS, EXTENSION = Path("tbhooks/capture/hooks/eager_hooks.c"), Path("tbhooks/capture/hooks/_eager_hooks.abi3.so")


class KernelBuildHook(BuildHookInterface[Any]):
    """Hatchling's hook: compiles before the wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Leaves the libraries beside their sources and has them packed, or says why not."""
        if self.target_name != "wheel":
            return
        rules = Path(self.root) / "docs" / "rules.md"
        if version == "standard" and rules.is_file():  # findings in the tab link to it; a checkout has it in docs/
            build_data["force_include"][str(rules)] = "tbhooks/plugin/rules.md"
        # TBHOOKS_PURE=1 builds the wheel for platforms that no wheel with a kernel is built for.
        if os.environ.get("TBHOOKS_PURE") == "1" or not compile_kernel(Path(self.root)):
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        if compile_hooks(Path(self.root)):
            build_data["artifacts"].append(str(EXTENSION))
            build_data["tag"] = f"cp311-abi3-{platform}"


def compile_kernel(root: Path) -> bool:
    """Whether there is a fresh library now."""
    return _compile(root, SOURCE, LIBRARY, "-lm", without="torch operations serve")


def compile_hooks(root: Path) -> bool:
    """The same for the hooks in C."""
    include = sysconfig.get_path("include")
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        (root / EXTENSION).unlink(missing_ok=True)  # these have another ABI
        return False
    return _compile(root, HOOKS, EXTENSION, f"-I{include}", without="hooks in Python serve")


def _compile(root: Path, source: Path, library: Path, *options: str, without: str) -> bool:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    (root / library).unlink(missing_ok=True)
    if os.name != "posix" or shutil.which(compiler[0]) is None:
        print(f"tbhooks: no C compiler, so {source.name} is left out; {without}", file=sys.stderr)
        return False
    # On macOS the symbols of Python are found when the library is loaded.
    lazily = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    command = [*compiler, *FLAGS, str(root / source), *options, *lazily, "-o", str(root / library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"tbhooks: {source.name} did not compile and is left out; {without}:\n{done.stderr}", file=sys.stderr)
    return done.returncode == 0
