"""The script of docs/distributed.md runs under torchrun, and its run is that of both ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tbhooks import runs
from tests.support.slow import slow

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


@slow(
    "two processes that each import torch",
    covered_by="test_an_example_runs_on_two_processes_and_writes_one_run_of_both",
)
def test_the_script_of_the_page_merges_two_ranks(tmp_path: Path) -> None:
    (script,) = re.findall(r"tests/distributed runs it -->\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "ddp.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "ddp.py"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=alone, timeout=200, check=True, capture_output=True)
    run = runs.read(tmp_path / "runs" / "ddp")
    assert (run.state, [frame.step for frame in run.frames]) == ("finished", [0, 10, 20, 30, 40])
    assert run.frames[0]["0", "activation"].count == 2 * 16 * 32
