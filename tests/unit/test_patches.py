"""Whatever a watch replaces in other packages is the original object again when the last watch has closed."""

from __future__ import annotations

import copyreg
import gc
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame
import wrapt
from tensorboard.summary.writer import record_writer
from torch import distributed, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks.data.process import patching
from tests.support.compiling import reset

Found = dict[str, Any]
OF_A_WATCH = {
    "GradScaler.scale", "GradScaler.step", "GradScaler.unscale_", "convert_frame._compile",
    "dispatch_table[OrderedDict]", "masked_crc32c", "make_graphed_callables", "graphs.make_graphed_callables",
}  # fmt: skip


def attributes() -> Found:
    """Everything this package may replace, as it is now."""
    found: Found = {f"GradScaler.{name}": vars(GradScaler)[name] for name in ("scale", "step", "unscale_")}
    found["convert_frame._compile"] = vars(torch._dynamo.convert_frame)["_compile"]
    found["dispatch_table[OrderedDict]"] = copyreg.dispatch_table.get(OrderedDict)
    found["masked_crc32c"] = record_writer.masked_crc32c
    found["destroy_process_group"] = distributed.destroy_process_group
    found["make_graphed_callables"] = torch.cuda.make_graphed_callables
    found["graphs.make_graphed_callables"] = torch.cuda.graphs.make_graphed_callables
    found["torch.compile"] = torch.compile
    found["Optimizer.__init__"] = vars(torch.optim.Optimizer)["__init__"]
    found["SummaryWriter.__init__"] = vars(SummaryWriter)["__init__"]
    return found


def replaced(before: Found) -> set[str]:
    now = attributes()
    return {name for name, original in before.items() if now[name] is not original}


@pytest.fixture
def before() -> Found:
    reset()
    tbhooks.watch(nn.Linear(2, 2)).close()  # what is patched for compiled code goes with the last watch
    gc.collect()  # sinks that earlier tests did not close
    for patch in patching.declared():
        patch.release(gc.collect)  # of a stranger: undoes the patch if nobody holds it any more
    found = attributes()
    assert not [name for name, value in found.items() if isinstance(value, wrapt.FunctionWrapper)]
    return found


def train(model: Any, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()


def test_a_watch_replaces_what_it_needs_until_it_closes(before: Found, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    watching = tbhooks.watch(model, tmp_path, every=1)
    assert replaced(before) == OF_A_WATCH
    train(model)
    assert replaced(before) == OF_A_WATCH
    watching.close()
    assert replaced(before) == set()


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_two_watches_undo_everything_with_the_last(before: Found, tmp_path: Path, first_to_close: int) -> None:
    model = nn.Linear(2, 2)
    watches = [tbhooks.watch(model, tmp_path / name, every=1) for name in ("one", "other")]
    train(model)
    watches[first_to_close].close()
    assert replaced(before) == OF_A_WATCH
    train(model)
    watches[1 - first_to_close].close()
    assert replaced(before) == set()


def test_a_watch_that_cannot_be_made_leaves_nothing_behind(before: Found, tmp_path: Path) -> None:
    with pytest.raises(tbhooks.ArgumentError):
        tbhooks.watch(nn.Linear(2, 2), tmp_path, every=0)
    assert replaced(before) == set()


def test_peek_leaves_nothing_behind(before: Found) -> None:
    tbhooks.peek(nn.Linear(2, 2), torch.ones(3, 2))
    assert replaced(before) == set()


def test_peek_does_not_blame_a_compiler_that_is_wrapped_for_watches_only() -> None:
    class Forgets(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.unused = nn.Linear(2, 2)

    notes = tbhooks.peek(Forgets(), torch.ones(3, 2)).notes
    assert any("unused: forward() never called" in note for note in notes), notes


def test_the_compiler_stays_wrapped_while_code_with_hooks_is_there(before: Found) -> None:
    """Its graphs must not count against the user's limit of recompiles."""
    model = nn.Linear(2, 2)
    with tbhooks.watch(model, every=1):
        train(torch.compile(model, backend="eager"))
    assert replaced(before) == {"convert_frame._compile"}
    reset()
    tbhooks.watch(nn.Linear(2, 2)).close()
    assert replaced(before) == set()


SCRIPT = """
import torch, torch.utils.tensorboard as tb
from torch import nn
torch.save  # what a script does
optimizer_init = vars(torch.optim.Optimizer)["__init__"]
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
import atexit
print("while:", *(type(each).__name__ for each in (optimizer_init, torch.compile, vars(tb.SummaryWriter)["__init__"])))
"""
AROUND = """
import atexit, sys
def look():
    import torch, torch.utils.tensorboard as tb
    from torch.amp.grad_scaler import GradScaler
    patched = (vars(torch.optim.Optimizer)["__init__"], torch.compile, vars(tb.SummaryWriter)["__init__"],
               vars(GradScaler)["step"])
    print("after:", *(type(each).__name__ for each in patched))
atexit.register(look)  # before the session's own, so called after it
from tbhooks.__main__ import main
sys.exit(main(["run", "--logdir", sys.argv[1], "--every", "1", sys.argv[2]]))
"""


def test_a_script_run_by_tbhooks_has_everything_put_back_at_its_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", AROUND, str(tmp_path / "run"), str(script)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert "while: FunctionWrapper FunctionWrapper FunctionWrapper" in done.stdout, done.stderr
    assert "after: function function function function" in done.stdout, done.stderr
