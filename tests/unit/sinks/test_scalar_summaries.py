"""Models with hundreds of layers: summaries take the place of one chart per layer, and the run stays small."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from tbhooks import runs
from tbhooks.capture.schedule import Schedule
from tbhooks.data.frame import Frame, Site
from tbhooks.data.grids import own_scalars
from tbhooks.sinks.scalar_selection import CORE_SCALARS, is_summarised, scalar_table, scalars_of
from tbhooks.sinks.scalar_summaries import MOST_TAGS
from tests.support.frames import events, make_frame, write_run

AUTO = scalar_table("auto")


def deep(layers: int, step: int = 0) -> Frame:
    rng = np.random.default_rng(step)
    data: dict[Site, np.ndarray] = {Site("embed", "activation"): rng.normal(size=8)}
    for i in range(layers):
        for part in ("q_proj", "mlp"):
            data[Site(f"layers.{i}.{part}", "activation")] = (i + 1) * np.array([1.0, -1.0] * 4)
            data[Site(f"layers.{i}.{part}.weight", "weight")] = rng.normal(size=8)
    return make_frame(step, data)


def test_up_to_some_three_hundred_scalars_are_those_of_every_layer() -> None:
    few = deep(37)  # 1 + 2 * 37 outputs with three scalars each, and 74 weights
    assert 3 * 75 + 74 <= MOST_TAGS < 3 * 77 + 76
    assert scalars_of(few, AUTO) == scalars_of(few, dict(CORE_SCALARS))
    assert not is_summarised(few.sites, AUTO)
    assert is_summarised(deep(38).sites, AUTO)


def test_beyond_that_there_are_median_least_and_most_by_kind_and_by_role() -> None:
    found = scalars_of(deep(101), AUTO)
    start = "summary.activation.std/layers.*.mlp"
    assert [found[f"{start} {part}"] for part in ("least", "median", "most")] == [1.0, 51.0, 101.0]
    assert found["summary.activation.std/(all) most"] == 101.0
    assert "summary.activation.std/embed" in found
    assert len(found) < 60
    assert not [tag for tag in found if "layers.7" in tag]


@pytest.mark.parametrize("scalars", ["core", "all", ("std",)])
def test_what_is_asked_for_by_name_is_never_summarised(scalars: object) -> None:
    assert not is_summarised(deep(200).sites, scalar_table(scalars))


def test_layers_without_a_common_role_have_summaries_by_kind_only() -> None:
    frame = make_frame(0, {Site(f"layer{i}", "activation"): [1.0, float(i)] for i in range(400)})
    assert all("/(all) " in tag for tag in scalars_of(frame, AUTO))


def test_a_nan_anywhere_is_counted_by_kind() -> None:
    sites = {Site(f"l.{i}", "activation"): [1.0, np.nan if i == 7 else 2.0] for i in range(200)}
    assert scalars_of(make_frame(0, sites), AUTO)["summary.activation/tensors with NaN or infinity"] == 1.0


def test_tensorboard_gets_summaries_and_their_layers_and_a_reader_every_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [deep(101, step) for step in range(3)]
    with caplog.at_level(logging.INFO, logger="tbhooks"):
        write_run(tmp_path, *frames, scalars="auto")
    assert [r.levelname for r in caplog.records if "summaries by kind and by role" in r.message] == ["INFO"]
    run = runs.read(tmp_path)
    assert run.problems == []
    assert run.frames[1]["layers.7.mlp", "activation"].std == pytest.approx(8.0)
    assert run.frames[1].buckets.shape == frames[1].buckets.shape
    assert own_scalars(run.scalars) == []
    written = {value.tag: value for event in events(tmp_path) for value in event.summary.value}
    assert not [tag for tag in written if tag.startswith(("activation", "weight"))]
    text = written["summary/which layer/text_summary"].tensor.string_val[0].decode()
    assert "| activation.std | `layers.*.mlp` | 1 | `layers.0.mlp` | 101 | `layers.100.mlp` |" in text


def test_a_thousand_modules_for_three_hundred_logged_steps_stay_below_120_mb(tmp_path: Path) -> None:
    """Weighed with a tenth of the modules over six steps, half of them with histograms as in such a run."""
    rng = np.random.default_rng(0)
    kinds = ("activation", "gradient", "weight", "weight_gradient", "update")
    count, logged = 200, 300
    sizes = []
    for histograms in (True, False):
        frames = []
        for step in range(3):
            data = {
                Site(f"layers.{i}.mlp", kind): rng.normal(size=300) * np.exp(rng.normal())
                for kind in kinds
                for i in range(count)
            }
            frames.append(make_frame(step, data, histograms=histograms))
        where = write_run(tmp_path / str(histograms), *frames, scalars="auto")
        sizes.append(sum(path.stat().st_size for path in where.iterdir()) / 3 / (count * len(kinds)))
    with_histograms, without = sizes
    drawn = sum(map(Schedule(1, True).takes_histograms, range(logged)))
    # 1,000 outputs and their gradients, 1,000 parameters with three kinds each.
    sites = 5000
    assert sites * (drawn * with_histograms + (logged - drawn) * without) < 120e6
