"""Builds the C kernel into the package where there is a compiler; without one the package is pure Python."""

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


class KernelBuildHook(BuildHookInterface[Any]):
    """Hatchling's hook: compiles before the wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Leaves the library beside its source and has it packed, or says why not."""
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


def compile_kernel(root: Path) -> bool:
    """Whether there is a fresh library now."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    (root / LIBRARY).unlink(missing_ok=True)
    if os.name != "posix" or shutil.which(compiler[0]) is None:
        print("tbhooks: no C compiler, so the kernel is left out; torch operations serve", file=sys.stderr)
        return False
    command = [*compiler, *FLAGS, str(root / SOURCE), "-lm", "-o", str(root / LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"tbhooks: the kernel did not compile and is left out:\n{done.stderr}", file=sys.stderr)
    return done.returncode == 0
