"""The first bit in which two runs differ: which step, which tensor, and what can be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tbhooks
from tbhooks.cli import main
from tbhooks.data.frame import Frame, Site
from tbhooks.runs import compare
from tbhooks.runs.bit_comparison import compare_bits
from tests.support.frames import make_frame
from tests.support.loops import mlp, sgd

# As a training records them: the forward, the backward, then weights, gradients and updates.
SITES = [
    Site("a", "activation"), Site("b", "activation"), Site("b", "gradient"), Site("a", "gradient"),
    Site("a.weight", "weight"), Site("a.weight", "weight_gradient"), Site("a.weight", "update"),
    Site("a.weight", "first_moment"), Site("a.weight", "proposed_update"), Site("a", "functional"),
]  # fmt: skip


def frame(step: int, **changes: int) -> Frame:
    """A frame whose checksums are equal to those of another, but for changes by `kind_path`."""
    made = make_frame(step, {site: np.ones(3) for site in SITES})
    sums = [(changes.get(f"{site.kind}_{site.path[0]}", 7), 1) for site in SITES]
    return replace(made, checksums=np.array(sums, np.uint64))


def run_of(*frames: Frame, **environment: str) -> tbhooks.runs.Run:
    return tbhooks.runs.Run(Path("run"), list(frames), [], {}, environment=environment)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"update_a": 1}, "update/a.weight"),
        ({"update_a": 1, "weight_gradient_a": 1}, "weight_gradient/a.weight"),
        ({"update_a": 1, "gradient_a": 1, "gradient_b": 1}, "gradient/b"),
        ({"activation_b": 1, "gradient_a": 1, "update_a": 1}, "activation/b"),
        ({"activation_a": 1, "activation_b": 1}, "activation/a"),
        ({"weight_a": 1, "activation_a": 1}, "weight/a.weight"),
        ({"update_a": 1, "proposed_update_a": 1, "first_moment_a": 1}, "first_moment/a.weight"),
        ({"first_moment_a": 1, "weight_gradient_a": 1}, "weight_gradient/a.weight"),
        ({"functional_a": 1, "gradient_a": 1}, "functional/a"),
    ],
)
def test_forward_comes_before_backward_and_backward_before_update(changes: dict[str, int], first: str) -> None:
    same = [frame(0), frame(10)]
    found = compare_bits(run_of(*same, frame(20)), run_of(*same, frame(20, **changes), frame(30)))
    assert found is not None
    assert (found.step, str(found.site), found.others) == (20, first, len(changes) - 1)
    assert found.last_equal == 10
    assert sum(found.kinds.values()) == len(changes)


def test_equal_runs_have_no_first_difference() -> None:
    found = compare_bits(run_of(frame(0), frame(10)), run_of(frame(0), frame(10), frame(20)))
    assert found is not None
    assert (found.steps, found.step, found.site, found.last_equal) == (2, None, None, 10)


def test_a_run_without_checksums_cannot_be_compared() -> None:
    assert compare_bits(run_of(frame(0)), run_of(make_frame(0))) is None


def test_other_types_are_left_out_and_listed() -> None:
    other = frame(0, activation_a=1)
    sums = other.checksums.copy()
    sums[0, 1] = 3
    found = compare_bits(run_of(frame(0)), run_of(replace(other, checksums=sums)))
    assert found is not None
    assert found.step is None
    assert found.other_types == {"activation/a": ("float32", "bfloat16")}


def test_a_tensor_that_has_no_checksum_in_a_run_is_left_out() -> None:
    sums = frame(0, activation_a=1).checksums.copy()
    sums[0] = 0
    found = compare_bits(run_of(frame(0)), run_of(replace(frame(0), checksums=sums)))
    assert found is not None
    assert (found.step, found.other_types) == (None, {})


def test_versions_and_devices_that_differ_are_named() -> None:
    one = run_of(frame(0), torch="2.13.0", system="Linux x86_64", devices="cpu (2 threads)", tbhooks="1")
    two = run_of(frame(0, update_a=1), torch="2.15.0", system="Linux x86_64", devices="cpu (4 threads)", tbhooks="2")
    found = compare_bits(one, two)
    assert found is not None
    assert found.environments == {"torch": ("2.13.0", "2.15.0"), "devices": ("cpu (2 threads)", "cpu (4 threads)")}
    assert compare.compare(one, two).to_dict()["bits"]["site"] == {"path": "a.weight", "kind": "update", "index": ""}


def train(directory: Path, flip_at: int | None) -> None:
    model = mlp()
    optimizer = sgd(model)
    w = tbhooks.watch(model, directory, every=1).checksums()
    for step in range(4):
        inputs = torch.randn(16, 4)
        if step == flip_at:
            inputs.view(torch.int32)[3, 2] ^= 1
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    w.close()


def test_the_report_of_two_real_runs_names_step_and_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, flip_at in (("a", None), ("b", None), ("c", 2)):
        train(tmp_path / name, flip_at)
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "bits: all checksums are equal in 4 logged steps" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "c")]) == 0
    printed = capsys.readouterr().out
    assert "bits: the first difference is at step 2, in activation/0" in printed
    assert "all are equal up to step 1" in printed
    assert "round differently" not in printed
