"""Instructions that the hooks in C execute for a tiny layer, counted by valgrind: the same on a busy machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tbhooks.capture.hooks import eager_hooks
from tests.support.slow import slow

LAYERS, STEPS = 100, 4
# Measured with torch 2.13 and CPython 3.11: 10,100, of which a few hundred are the kernel. Valgrind knows no AVX-512.
MOST = 11_500

SCRIPT = f"""
import os, subprocess
import torch, tbhooks
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*(m for _ in range({LAYERS // 2}) for m in (nn.Linear(16, 16), nn.ReLU())))
optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(16, 16)
kinds = ("activation", "gradient")
with tbhooks.watch(model, every=1, kinds=kinds, histograms=False, rules=()) as w:
    for step in range(3 + {STEPS}):
        if step == 3:
            subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], stdout=subprocess.DEVNULL, check=True)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        w.flush()
    subprocess.run(["callgrind_control", "-i", "off", str(os.getpid())], stdout=subprocess.DEVNULL, check=True)
print("read", w.stats.hooks_fired)
"""


@slow("half a minute under valgrind", covered_by="test_the_work_for_a_layer_does_not_grow")
@pytest.mark.skipif(eager_hooks._make_lane() is None, reason="the package has no hooks in C here")
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_the_instructions_for_a_tiny_tensor_do_not_grow(tmp_path: Path) -> None:
    command = [
        "valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={tmp_path / 'out'}",
        "--toggle-collect=ForwardHook_read", "--toggle-collect=GradientHook_call", sys.executable, "-c", SCRIPT,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    collected = re.search(r"Collected : (\d+)", done.stderr)
    assert collected is not None, done.stderr[-2000:]
    per_tensor = int(collected[1]) / (2 * LAYERS * STEPS)
    assert 1_000 < per_tensor <= MOST, f"{per_tensor:.0f} instructions for each tensor"
