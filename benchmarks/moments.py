"""Instructions that the C kernel executes for each element, counted by callgrind: the same on a busy machine.

    python benchmarks/moments.py [--against REVISION]

`--against` compiles and counts the kernel of another commit as well, such as the last one without skewness and
kurtosis. Valgrind has no AVX-512: the counts are those of AVX2, or of the baseline with --baseline.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNEL, PROGRAM = "tbhooks/reduction/kernel.c", "tests/unit/reduction/kernel/callgrind.c"
DTYPES = ("float32", "float64", "bfloat16", "float16")
ELEMENTS = 1 << 20


def build(kernel: str, directory: Path, baseline: bool) -> Path:
    """Compiles the program that reduces a million numbers with this kernel."""
    for name, text in ((KERNEL, kernel), (PROGRAM, (ROOT / PROGRAM).read_text())):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    program, source = directory / "reduce", directory / PROGRAM
    flags = ["-U__x86_64__"] if baseline else []
    subprocess.run(["cc", "-O3", "-fopenmp-simd", *flags, str(source), "-lm", "-o", str(program)], check=True)
    return program


def instructions(program: Path, dtype: int, with_buckets: bool) -> float:
    """For each element, without what the program does around the kernel."""
    out = program.with_suffix(".callgrind")
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--toggle-collect=tbhooks_reduce"]
    subprocess.run([*command, str(program), str(dtype), str(int(with_buckets))], check=True, capture_output=True)
    total = next(line for line in out.read_text().splitlines() if line.startswith(("summary:", "totals:")))
    return int(total.split()[1]) / ELEMENTS


def main() -> None:
    """Prints a table: one line for each type, with and without histograms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="a commit whose kernel is counted as well")
    parser.add_argument("--baseline", action="store_true", help="without AVX2")
    options = parser.parse_args()
    if shutil.which("valgrind") is None or shutil.which("cc") is None:
        sys.exit("needs valgrind and a C compiler")
    kernels = {"here": (ROOT / KERNEL).read_text()}
    if options.against:
        shown = ["git", "-C", str(ROOT), "show", f"{options.against}:{KERNEL}"]
        kernels = {options.against: subprocess.run(shown, check=True, capture_output=True, text=True).stdout, **kernels}
    with tempfile.TemporaryDirectory() as directory:
        programs = {}
        for i, (name, kernel) in enumerate(kernels.items()):
            programs[name] = build(kernel, Path(directory) / str(i), options.baseline)
        print(f"{'instructions per element':28}" + "".join(f"{name:>12}" for name in programs))
        for number, dtype in enumerate(DTYPES):
            for with_buckets in (False, True):
                counts = [instructions(program, number, with_buckets) for program in programs.values()]
                what = f"{dtype}{' with histogram' if with_buckets else ''}"
                print(f"{what:28}" + "".join(f"{count:12.2f}" for count in counts), flush=True)


if __name__ == "__main__":
    main()
