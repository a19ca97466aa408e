"""The tab's server without a server: what is asked, what is decoded, what is kept, what is answered.

Runs are written by the sink, read by TensorBoard's own Python loader and asked for through the tab's own routes.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto import event_pb2, summary_pb2, types_pb2
from tensorboard.data import provider as provider_types
from tensorboard.plugins import base_plugin
from tensorboard.plugins.core import core_plugin
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter
from werkzeug.test import Client

from tbhooks import plugin as entry
from tbhooks.data.artifacts.flights import Flight
from tbhooks.data.artifacts.samples import Group, Sample, Samples
from tbhooks.data.frame import KINDS, SAMPLED, Finding, Frame, Site
from tbhooks.data.jsonable import to_jsonable
from tbhooks.data.stats import STAT_NAMES
from tbhooks.plugin import index, provider, store
from tbhooks.plugin.cache import Cache
from tbhooks.plugin.server import STATIC, Plugin
from tbhooks.sinks.tensorboard import PLUGIN, STORED_COLUMNS, VERSION, TensorBoardSink
from tests.support import reference
from tests.support.frames import make_frame

A, B, C = (Site(path, "activation") for path in ("a", "b", "c"))
RNG = np.random.default_rng(0)
DATA = {A: RNG.normal(size=400), B: np.abs(RNG.normal(size=300)) * 1e-3, C: np.full(7, 2.5)}


# --- A log directory, and a tab over it ---


@dataclass
class Reply:
    status: int
    kind: str
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode()

    @property
    def json(self) -> Any:
        assert self.status == 200, self.text

        def literal(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        return json.loads(self.content, parse_constant=literal)

    @property
    def matrix(self) -> tuple[dict[str, Any], NDArray[np.float32]]:
        assert self.status == 200, self.text
        length = int.from_bytes(self.content[:4], "little")
        assert (4 + length) % 8 == 0
        header = json.loads(self.content[4 : 4 + length])
        values = np.frombuffer(self.content[4 + length :], "<f4")
        return header, values.reshape(len(header["steps"]), header["sites"])


class Tab:
    """The tab's routes over a directory, read by TensorBoard's Python loader, keeping every step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._multiplexer = EventMultiplexer(tensor_size_guidance={PLUGIN: 0})
        self.provider = MultiplexerDataProvider(self._multiplexer, str(directory))
        self.open()

    def open(self) -> None:
        loaded = entry.Loader().load(base_plugin.TBContext(data_provider=self.provider))
        assert isinstance(loaded, Plugin)
        self.routes = loaded.get_plugin_apps()
        self.reload()

    def reload(self) -> None:
        self._multiplexer.AddRunsFromDirectory(str(self._directory))
        self._multiplexer.Reload()

    def ask(self, route: str, /, **parameters: object) -> Reply:
        return self.query(route, {name: str(value) for name, value in parameters.items()})

    def query(self, route: str, parameters: Any, method: str = "GET") -> Reply:
        answer = Client(self.routes[f"/{route}"]).open(f"/{route}", query_string=parameters, method=method)
        return Reply(answer.status_code, answer.content_type or "", answer.data)


def write(directory: Path, *given: Frame) -> Path:
    sink = TensorBoardSink(directory, scalars=())
    for frame in given:
        sink.write(frame)
    sink.close()
    return directory


def write_values(directory: Path, *given: tuple[int, str, Any, bytes | None]) -> None:
    """Tensors under our name, whatever they and their descriptions are."""
    with SummaryWriter(str(directory)) as writer:
        for step, tag, tensor, content in given:
            value = summary_pb2.Summary.Value(tag=tag, tensor=tensor)
            if content is not None:
                value.metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
                value.metadata.plugin_data.plugin_name = PLUGIN
                value.metadata.plugin_data.content = content
            event = event_pb2.Event(step=step, wall_time=1e9 + step, summary=summary_pb2.Summary(value=[value]))
            writer._get_file_writer().event_writer.add_event(event)


def description(kind: str = "activation", sites: Any = (("a", ""),), **more: Any) -> bytes:
    content = {"version": VERSION, "kind": kind, "sites": sites, "columns": list(STORED_COLUMNS), **more}
    return json.dumps(content).encode()


def rows_tensor(*arrays: Any) -> Any:
    """Rows of these arrays as they are stored."""
    stats = [reference.stats(np.asarray(array)) for array in arrays]
    names = ("count", "mean", "std", "min", "max", "zero_fraction", "nan_count", "inf_count")
    shape = ("skewness", "kurtosis")
    listed = [[*(one[name] for name in names), 0.0, *(one[name] for name in shape)] for one in stats]
    rows = np.array(listed, dtype=np.float32).reshape(-1, len(STORED_COLUMNS))
    return tensor_util.make_tensor_proto(rows)


def counts_tensor(*arrays: Any) -> Any:
    """Histograms of these arrays as they are stored."""
    raw = io.BytesIO()
    np.save(raw, np.array([reference.bucket_counts(np.asarray(array)) for array in arrays], dtype=np.uint32))
    return tensor_util.make_tensor_proto(zlib.compress(raw.getvalue()))


ROWS = rows_tensor(DATA[A])


@pytest.fixture(autouse=True)
def every_question_lists_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LISTING_S", 0.0)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Tab:
    """Ten steps of three sites, histograms on every third; `b` is missing in step 20, and NaN in step 50."""
    frames = []
    for i in range(10):
        data: dict[Site, Any] = {site: array * (i + 1) for site, array in DATA.items()}
        if i == 2:
            del data[B]
        if i == 5:
            data[B] = np.array([1.0, math.nan, math.inf, -3.0])
        frames.append(make_frame(10 * i, data, histograms=i % 3 == 0))
    directory = tmp_path_factory.mktemp("runs")
    write(directory / "one", *frames)
    write(directory / "updates", make_frame(0))
    return Tab(directory)


# --- Loading ---


def test_loading_the_tab_does_not_import_torch() -> None:
    code = "import sys, tbhooks.plugin, tbhooks.plugin.server; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_name_is_the_one_data_is_stored_under() -> None:
    assert entry.NAME == PLUGIN


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], {PLUGIN: 0}),
        (["--samples_per_plugin=scalars=5,images=0"], {"scalars": 5, "images": 0, PLUGIN: 0}),
        ([f"--samples_per_plugin={PLUGIN}=50"], {PLUGIN: 50}),
    ],
    ids=["nothing said", "others chosen", "this one chosen"],
)
def test_every_step_is_kept_unless_the_user_said_otherwise(given: list[str], wanted: dict[str, int]) -> None:
    parser = argparse.ArgumentParser()
    core_plugin.CorePluginLoader().define_flags(parser)
    flags = parser.parse_args(["--logdir", "x", *given])
    entry.Loader().fix_flags(flags)
    assert flags.samples_per_plugin == wanted


def test_without_a_data_provider_there_is_no_tab() -> None:
    assert entry.Loader().load(base_plugin.TBContext()) is None


def test_every_file_of_the_page_has_a_route_and_nothing_else_of_the_package_has(tab: Tab) -> None:
    questions = {
        "/runs",
        "/sites",
        "/matrix",
        "/distribution",
        "/history",
        "/findings",
        "/samples",
        "/scalars",
        "/overview",
        "/rules.md",
        "/tab.js",
        "/tab.css",
    }
    files = {f"/{path.relative_to(STATIC).as_posix()}" for path in STATIC.rglob("*") if path.is_file()}
    assert set(tab.routes) == questions | files
    assert "/index.js" in files


# --- Parameters ---

GOOD = {
    "runs": {},
    "sites": {"run": "one", "kind": "activation"},
    "matrix": {"run": "one", "kind": "activation", "stat": "mean"},
    "distribution": {"run": "one", "kind": "activation", "path": "a", "step": "0"},
    "history": {"run": "one", "kind": "activation", "path": "a"},
    "findings": {"run": "one"},
    "samples": {"run": "one", "step": "0"},
    "scalars": {"run": "one"},
    "overview": {"run": "one"},
}
WRONG = {
    "run": ["two", "", "../one", "one/", "x" * 5000, "\x00"],
    "kind": ["activations", "", "eval.", "tbhooks/activation", "activation.buckets"],
    "stat": ["median", "", "Mean", "zeros", "__class__"],
    "after": ["", "now", "1.5", "1e3", "0x10", "٣", "9" * 19, "--1", " 1"],
    "step": ["", "first", "nan", "inf", "1_000", "9" * 40],
    "path": ["d", "", "A", "a[0]", "../a"],
    "index": ["0", "[0]", "x" * 1000],
    "form": ["", "text", "JSON"],
    "order": ["", "sites", "F"],
}


@pytest.mark.parametrize("route", GOOD)
def test_each_question_is_answered(tab: Tab, route: str) -> None:
    assert tab.query(route, GOOD[route]).status == 200


@pytest.mark.parametrize(
    ("route", "name"),
    [
        (route, name)
        for route, good in GOOD.items()
        for name in sorted(
            {
                *good,
                *(["after", "order"] if route == "matrix" else []),
                *(["index"] if "path" in good else []),
                *(["form"] if route == "history" else []),
            }
        )
    ],
)
def test_a_wrong_parameter_is_refused_with_a_sentence_that_names_it(tab: Tab, route: str, name: str) -> None:
    for value in WRONG[name]:
        reply = tab.query(route, GOOD[route] | {name: value})
        assert reply.status == 400, (value, reply.text)
        assert reply.kind.startswith("text/plain")
        assert name in reply.text
        assert repr(value)[1:30].rstrip("'") in reply.text
        assert "\n" not in reply.text
        assert len(reply.text) < 1000


@pytest.mark.parametrize(("route", "name"), [(route, name) for route, good in GOOD.items() for name in good])
def test_a_missing_parameter_is_named(tab: Tab, route: str, name: str) -> None:
    reply = tab.query(route, {key: value for key, value in GOOD[route].items() if key != name})
    assert (reply.status, reply.text) == (400, f"parameter {name!r} is missing")


@pytest.mark.parametrize("route", GOOD)
def test_unknown_and_doubled_parameters_are_refused(tab: Tab, route: str) -> None:
    reply = tab.query(route, GOOD[route] | {"kinds": "activation"})
    assert reply.status == 400
    assert "unknown parameter 'kinds'" in reply.text
    for name, value in GOOD[route].items():
        doubled = tab.query(route, [*GOOD[route].items(), (name, value)])
        assert (doubled.status, doubled.text) == (400, f"parameter {name!r} is given 2 times")


def test_the_nearest_right_name_is_suggested(tab: Tab) -> None:
    assert tab.ask("sites", run="ones", kind="activation").text == "unknown run 'ones': did you mean 'one'?"
    assert "did you mean 'activation'" in tab.ask("sites", run="one", kind="activatoin").text
    assert "did you mean 'std'" in tab.ask("matrix", run="one", kind="activation", stat="sdt").text
    assert "choose from 'a', 'b', 'c'" in tab.ask("history", run="one", kind="activation", path="q.w.e").text


def test_the_ratio_of_anything_but_an_update_is_refused(tab: Tab) -> None:
    reply = tab.ask("matrix", run="one", kind="activation", stat="ratio")
    assert reply.status == 400
    assert "only updates" in reply.text
    header, values = tab.ask("matrix", run="updates", kind="update", stat="ratio").matrix
    weight, update = np.array([0.5, -0.25]), np.array([0.03, 0.04])
    assert header["steps"] == [0]
    assert values[0, 0] == pytest.approx(np.linalg.norm(update) / np.linalg.norm(weight), rel=1e-6)


def test_a_kind_the_run_does_not_hold_is_missing_and_not_wrong(tab: Tab) -> None:
    reply = tab.ask("matrix", run="one", kind="eval.gradient", stat="mean")
    assert reply.status == 404
    assert reply.text == "run 'one' has no 'eval.gradient', but 'activation'"


def test_only_reading_is_allowed(tab: Tab) -> None:
    reply = tab.query("runs", {}, method="POST")
    assert reply.status == 405
    assert "GET" in reply.text
    assert tab.query("runs", {}, method="HEAD").content == b""


# --- Runs and sites ---


def test_runs_are_listed_with_their_kinds_and_newest_step(tab: Tab) -> None:
    answer = tab.ask("runs").json
    one, updates = answer["runs"]
    assert (one["name"], one["last_step"], one["last_time"], one["findings"]) == ("one", 90, 1e9 + 90, None)
    (kind,) = one["kinds"]
    assert (kind["kind"], kind["sites"], kind["histograms"], kind["last_step"]) == ("activation", 3, True, 90)
    assert "ratio" not in kind["stats"]
    assert [kind["kind"] for kind in updates["kinds"]] == list(KINDS)
    assert answer["stats"] == list(STAT_NAMES)
    assert answer["now"] > 1.7e9


def test_listing_runs_reads_no_tensor(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tab.provider, "read_tensors", None)
    assert len(tab.ask("runs").json["runs"]) == 2


def test_sites_are_in_the_order_they_were_written(tmp_path: Path) -> None:
    sites = [
        Site("z", "activation"),
        Site("a", "activation", "[1]"),
        Site("a", "activation", "[0]"),
        Site("", "activation"),
    ]
    write(tmp_path / "run", make_frame(data={site: [1.0] for site in sites}))
    answer = Tab(tmp_path).ask("sites", run="run", kind="activation").json
    assert (answer["run"], answer["kind"]) == ("run", "activation")
    assert [(site["path"], site["index"], site["name"]) for site in answer["sites"]] == [
        ("z", "", "z"), ("a", "[1]", "a[1]"), ("a", "[0]", "a[0]"), ("", "", ""),
    ]  # fmt: skip


# --- Matrices ---


def expected(stat: str, frame_data: dict[Site, Any]) -> list[float]:
    return [
        reference.stats(np.asarray(frame_data[site]))[stat] if site in frame_data else math.nan for site in (A, B, C)
    ]


@pytest.mark.parametrize("stat", ["count", "mean", "std", "norm", "rms", "min", "max", "abs_max", "zero_fraction"])
def test_a_matrix_holds_what_numpy_says(tab: Tab, stat: str) -> None:
    header, values = tab.ask("matrix", run="one", kind="activation", stat=stat).matrix
    assert {name: header[name] for name in ("run", "kind", "stat", "sites")} == {
        "run": "one", "kind": "activation", "stat": stat, "sites": 3,
    }  # fmt: skip
    assert header["steps"] == list(range(0, 100, 10))
    assert header["times"] == [1e9 + step for step in header["steps"]]
    for i in (0, 9):
        wanted = expected(stat, {site: array * (i + 1) for site, array in DATA.items()})
        np.testing.assert_allclose(values[i], wanted, rtol=2e-6)
    assert np.isnan(values[2]).tolist() == [False, True, False], "not seen in that step"


def test_cells_that_held_nan_or_infinity_are_listed(tab: Tab) -> None:
    header, values = tab.ask("matrix", run="one", kind="activation", stat="max").matrix
    assert header["nonfinite"] == [[5, 1]]
    assert "nonfinite_more" not in header
    assert values[5, 1] == 1.0, "over the finite ones"
    for stat, wanted in (("nan_count", 1.0), ("inf_count", 1.0), ("count", 4.0)):
        assert tab.ask("matrix", run="one", kind="activation", stat=stat).matrix[1][5, 1] == wanted
    assert tab.ask("matrix", run="one", kind="activation", stat="max", after=40).matrix[0]["nonfinite"] == [[0, 1]]


def test_quantiles_are_there_on_the_steps_with_histograms(tab: Tab) -> None:
    header, values = tab.ask("matrix", run="one", kind="activation", stat="p50").matrix
    assert header["steps"] == [0, 30, 60, 90]
    for row, factor in zip(values, (1, 4, 7, 10), strict=True):
        medians = [np.quantile(array * factor, 0.5) for array in DATA.values()]
        np.testing.assert_allclose(row[1:], medians[1:], rtol=0.1)
        assert abs(row[0] - medians[0]) < 0.1 * factor


@pytest.mark.parametrize("stat", ["std", "norm", "p50"])
@pytest.mark.parametrize("after", [-1, 44, 90])
def test_the_numbers_of_a_site_are_next_to_each_other_if_that_is_asked_for(tab: Tab, stat: str, after: int) -> None:
    question = {"run": "one", "kind": "activation", "stat": stat, "after": after}
    header, values = tab.ask("matrix", **question).matrix
    assert tab.ask("matrix", **question, order="step").content == tab.ask("matrix", **question).content
    by_site = tab.ask("matrix", **question, order="site")
    assert by_site.matrix[0] == header
    assert by_site.content[-values.nbytes or len(by_site.content) :] == values.T.tobytes()


@pytest.mark.parametrize(("after", "left"), [(-1, 10), (0, 9), (44, 5), (90, 0), (10**18 - 1, 0)])
def test_only_later_steps_are_sent_when_asked_for(tab: Tab, after: int, left: int) -> None:
    header, values = tab.ask("matrix", run="one", kind="activation", stat="std", after=after).matrix
    whole = tab.ask("matrix", run="one", kind="activation", stat="std").matrix[1]
    assert header["steps"] == list(range(0, 100, 10))[10 - left :]
    assert values.tobytes() == whole[10 - left :].tobytes()


def test_the_ratio_to_a_weight_that_is_still_zero_is_undefined_and_not_infinite(tmp_path: Path) -> None:
    weight, update = Site("w", "weight"), Site("w", "update")
    frames = [make_frame(step, {weight: [0.0, float(step)], update: [1.0, 2.0]}) for step in (0, 1)]
    write(tmp_path / "run", *frames)
    tab = Tab(tmp_path)
    header, values = tab.ask("matrix", run="run", kind="update", stat="ratio").matrix
    assert (header["undefined"], header["nonfinite"]) == ([[0, 0]], [])
    assert not math.isinf(values[0, 0])
    assert values[1, 0] == pytest.approx(math.sqrt(5))
    assert "undefined" not in tab.ask("matrix", run="run", kind="update", stat="norm").matrix[0]
    first, second = tab.ask("history", run="run", kind="update", path="w").json["stats"]["ratio"]
    assert (first, second) == (None, pytest.approx(math.sqrt(5)))


def test_the_overview_has_a_verdict_what_was_watched_and_the_scalars(tmp_path: Path) -> None:
    found = [Finding(step, A, "non_finite", "error", "NaN in a", {"since": 2}) for step in (2, 3)]
    frames = [
        make_frame(step, {A: [1.0, 2.0]}, scalars={"loss": 3.0 - step}, findings=[f for f in found if f.step == step])
        for step in range(4)
    ]
    write(tmp_path / "run", *frames)
    tab = Tab(tmp_path)
    answer = tab.ask("overview", run="run").json
    (cause,) = answer["verdict"]["causes"]
    assert (answer["verdict"]["level"], cause["onset"], cause["issues"][0]["count"]) == ("error", 2, 2)
    assert answer["watched"] == [{"kind": "activation", "sites": 1}]
    assert "gradients of activations" in answer["unwatched"]
    assert answer["steps"] == {"count": 4, "first": 0, "last": 3}
    (loss,) = tab.ask("scalars", run="run").json["scalars"]
    assert loss == {"tag": "loss", "steps": [0, 1, 2, 3], "values": [3.0, 2.0, 1.0, 0.0]}
    (run,) = tab.ask("runs").json["runs"]
    assert run["state"] == "failed", "not finite at its last step"


def test_sites_have_the_role_of_their_module(tmp_path: Path) -> None:
    names = ("embed", "layers.0.q", "layers.1.q")
    write(tmp_path / "run", make_frame(0, {Site(name, "activation"): [1.0] for name in names}))
    sites = Tab(tmp_path).ask("sites", run="run", kind="activation").json["sites"]
    assert [site["role"] for site in sites] == ["embed", "layers.*.q", "layers.*.q"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("activation", True),
        ("head.activation", True),
        ("expert.weight", True),
        ("activation.head", False),
        ("x.", False),
    ],
)
def test_kinds_of_parts_of_a_tensor_may_have_any_prefix(name: str, known: bool) -> None:
    assert index.is_kind(name) is known


def test_masks_inside_attention_are_no_alarm(tmp_path: Path) -> None:
    data = {Site("attn:softmax", "functional"): [0.5, 0.5], Site("attn:softmax.logits", "functional"): [-math.inf, 1.0]}
    write(tmp_path / "run", make_frame(0, data))
    header, _ = Tab(tmp_path).ask("matrix", run="run", kind="functional", stat="max").matrix
    assert header["nonfinite"] == []


def test_more_bad_cells_than_a_page_can_mark_are_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tbhooks.plugin.responses.MOST_NONFINITE", 3)
    write(tmp_path / "run", *(make_frame(step, {A: [math.nan], B: [math.inf]}) for step in range(2)))
    header, _ = Tab(tmp_path).ask("matrix", run="run", kind="activation", stat="mean").matrix
    assert header["nonfinite"] == [[0, 0], [0, 1], [1, 0]]
    assert header["nonfinite_more"] is True


# --- Sites that come later, runs that start again ---


def test_a_site_that_comes_later_is_a_row_that_was_not_seen_before(tmp_path: Path) -> None:
    first, later = {A: [1.0], C: [3.0]}, {A: [1.5], B: [2.0], C: [3.5]}
    write(tmp_path / "run", make_frame(0, first), make_frame(1, first), make_frame(2, later), make_frame(3, first))
    tab = Tab(tmp_path)
    assert [site["path"] for site in tab.ask("sites", run="run", kind="activation").json["sites"]] == ["a", "c", "b"]
    header, values = tab.ask("matrix", run="run", kind="activation", stat="mean").matrix
    nan = math.nan
    assert header["steps"] == [0, 1, 2, 3]
    np.testing.assert_array_equal(values, [[1, 3, nan], [1, 3, nan], [1.5, 3.5, 2], [1, 3, nan]])
    assert tab.ask("runs").json["runs"][0]["kinds"][0]["sites"] == 3
    assert tab.ask("matrix", run="run", kind="activation", stat="p50").matrix[0]["steps"] == [0, 1, 2, 3]
    answer = tab.ask("distribution", run="run", kind="activation", path="b", step=0).json
    assert (answer["row_step"], answer["histogram_step"], answer["counts"]) == (2, 2, [1])


def test_lists_of_sites_that_do_not_continue_each_other_are_joined(tmp_path: Path) -> None:
    first, second = description(sites=[["a", ""], ["b", ""]]), description(sites=[["c", ""], ["a", ""]])
    write_values(
        tmp_path / "run",
        (0, "tbhooks/activation", rows_tensor([1.0], [2.0]), first),
        (1, "tbhooks/activation.2", rows_tensor([3.0], [4.0]), second),
    )
    tab = Tab(tmp_path)
    assert [site["path"] for site in tab.ask("sites", run="run", kind="activation").json["sites"]] == ["a", "b", "c"]
    _, values = tab.ask("matrix", run="run", kind="activation", stat="mean").matrix
    np.testing.assert_array_equal(values, [[1, 2, math.nan], [4, math.nan, 3]])


def test_a_step_that_is_written_again_is_what_it_was_the_last_time(tmp_path: Path) -> None:
    def at(step: int, value: float, time: float, *sites: Site) -> Frame:
        frame = make_frame(step, {site: [value] for site in sites})
        return Frame(step, time, 0, frame.sites, frame.values, frame.buckets)

    # The first process meets b at step 2 and goes on in a second tag; the restart is back in the first one.
    before = [at(step, 1.0, 100 + step, *((A, B) if step >= 2 else (A,))) for step in range(6)]
    write(tmp_path / "run", *before)
    again = [at(step, 2.0, 200 + step, *((A, B) if step >= 4 else (A,))) for step in range(3, 6)]
    write(tmp_path / "run" / "later", *again)
    (other,) = (tmp_path / "run" / "later").glob("*tfevents*")
    other.rename(tmp_path / "run" / "events.out.tfevents.9999999999.later")
    tab = Tab(tmp_path)
    tab.reload()
    header, values = tab.ask("matrix", run="run", kind="activation", stat="mean").matrix
    assert header["steps"] == [0, 1, 2, 3, 4, 5]
    assert header["times"] == [100, 101, 102, 203, 204, 205]
    assert values[:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    np.testing.assert_array_equal(values[:, 1], [math.nan, math.nan, 1, math.nan, 2, 2])


# --- One module ---


def test_a_distribution_is_trimmed_and_lies_within_the_exact_range(tab: Tab) -> None:
    answer = tab.ask("distribution", run="one", kind="activation", path="a", index="", step=60).json
    array = DATA[A] * 7
    assert (answer["step"], answer["row_step"], answer["histogram_step"]) == (60, 60, 60)
    edges, counts = answer["edges"], answer["counts"]
    assert len(edges) == len(counts) + 1
    assert edges == sorted(edges)
    assert edges[0] == np.float32(array.min())
    assert edges[-1] == np.float32(array.max())
    wanted = reference.bucket_counts(array)
    assert counts == np.trim_zeros(wanted).tolist()
    for name, value in reference.stats(array).items():
        assert answer["stats"][name] == pytest.approx(value, rel=2e-6), name
    assert set(answer["stats"]) == set(STAT_NAMES) - {"ratio"}


def test_the_nearest_steps_are_distinguished_for_rows_and_histograms(tab: Tab) -> None:
    answer = tab.ask("distribution", run="one", kind="activation", path="b", step=22).json
    assert (answer["row_step"], answer["histogram_step"]) == (30, 30), "b was not seen at 20"
    answer = tab.ask("distribution", run="one", kind="activation", path="a", step=41).json
    assert (answer["row_step"], answer["histogram_step"]) == (40, 30)
    assert "p50" not in answer["stats"], "no histogram at that step"
    for step, nearest in ((-5, 0), (10**17, 90), (5, 0)):
        answer = tab.ask("distribution", run="one", kind="activation", path="a", step=step).json
        assert answer["row_step"] == nearest


def test_a_constant_is_one_bar_without_width_and_what_is_not_finite_has_none(tmp_path: Path) -> None:
    write(tmp_path / "run", make_frame(0, {A: np.full(5, 2.5), B: [math.nan, math.inf]}))
    tab = Tab(tmp_path)
    answer = tab.ask("distribution", run="run", kind="activation", path="a", step=0).json
    assert (answer["edges"], answer["counts"]) == ([2.5, 2.5], [5])
    answer = tab.ask("distribution", run="run", kind="activation", path="b", step=0).json
    assert (answer["edges"], answer["counts"], answer["stats"]["mean"], answer["stats"]["nan_count"]) == (
        [],
        [],
        "nan",
        1.0,
    )


def test_an_update_that_was_sampled_says_how_much_of_it_was_read(tmp_path: Path) -> None:
    write(tmp_path / "run", make_frame(0, scalars={f"{SAMPLED}0.weight": 0.25}))
    tab = Tab(tmp_path)
    for kind, share in (("update", 0.25), ("weight", None)):
        assert tab.ask("distribution", run="run", kind=kind, path="0.weight", step=0).json["sampled"] == share


def test_without_histograms_there_are_still_stats(tmp_path: Path) -> None:
    write(tmp_path / "run", *(make_frame(step, {A: DATA[A]}, histograms=False) for step in range(3)))
    tab = Tab(tmp_path)
    answer = tab.ask("distribution", run="run", kind="activation", path="a", step=1).json
    assert (answer["histogram_step"], answer["edges"], answer["counts"]) == (None, [], [])
    assert answer["stats"]["mean"] == pytest.approx(DATA[A].mean(), rel=1e-6)
    answer = tab.ask("history", run="run", kind="activation", path="a").json
    assert (
        answer["quantile_steps"]
        == answer["ridges"]["steps"]
        == answer["ridges"]["edges"]
        == answer["ridges"]["counts"]
        == []
    )
    assert tab.ask("matrix", run="run", kind="activation", stat="p99").matrix[0]["steps"] == []
    assert "p99" not in tab.ask("runs").json["runs"][0]["kinds"][0]["stats"]


@pytest.mark.parametrize("route", ["/runs", "/tab.js", "/docs.html"])
def test_an_answer_does_not_wait_until_its_headers_are_acknowledged(tab: Tab, route: str) -> None:
    with socket.socket() as connection:
        assert not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        Client(tab.routes[route]).get(route, environ_overrides={"werkzeug.socket": connection})
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def decoded_history(content: bytes) -> dict[str, Any]:
    """A history in the binary form as it is in JSON."""
    length = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + length])
    numbers = np.frombuffer(content[4 + length :], "<f4")
    steps, drawn = len(header["steps"]), len(header["quantile_steps"])
    names = [*(name for name, _ in header["stats"]), *header["quantiles"]]
    assert len(numbers) == steps * len(header["stats"]) + drawn * len(header["quantiles"])
    ends = np.cumsum([steps] * len(header["stats"]) + [drawn] * len(header["quantiles"]))
    lists: dict[str, Any] = {
        name: to_jsonable(part.tolist()) for name, part in zip(names, np.split(numbers, ends), strict=False)
    }
    for name, unknown in header["stats"]:
        for i in unknown:
            lists[name][i] = None
    header["stats"] = {name: lists[name] for name, _ in header["stats"]}
    header["quantiles"] = {name: lists[name] for name in header["quantiles"]}
    return header


@pytest.mark.parametrize("path", ["a", "b"])
def test_a_history_in_binary_form_says_the_same(tab: Tab, path: str) -> None:
    answer = tab.ask("history", run="one", kind="activation", path=path).json
    stats = answer["stats"].values()
    again = tab.ask("history", run="one", kind="activation", path=path, form="binary")
    assert again.kind == "application/octet-stream"
    assert decoded_history(again.content) == answer
    assert all(None in numbers for numbers in stats) == (path == "b")  # which is missing in a step


def test_a_history_has_every_stat_and_says_where_there_is_none(tab: Tab) -> None:
    answer = tab.ask("history", run="one", kind="activation", path="b").json
    assert answer["steps"] == list(range(0, 100, 10))
    assert all(series[2] is None and None not in series[3:] for series in answer["stats"].values())
    for name, value in reference.stats(DATA[B] * 10).items():
        assert answer["stats"][name][9] == pytest.approx(value, rel=2e-6), name
    assert answer["quantile_steps"] == [0, 30, 60, 90]
    assert set(answer["quantiles"]) == {"p01", "p25", "p50", "p75", "p99"}
    assert answer["quantiles"]["p75"] == pytest.approx([np.quantile(DATA[B] * i, 0.75) for i in (1, 4, 7, 10)], rel=0.1)
    ridges = answer["ridges"]
    assert ridges["steps"] == [0, 30, 60, 90]
    assert [sum(counts) for counts in ridges["counts"]] == [300] * 4
    assert {len(counts) for counts in ridges["counts"]} == {len(ridges["edges"]) - 1}
    assert ridges["edges"][0] == np.float32(DATA[B].min())
    assert ridges["edges"][-1] == np.float32((DATA[B] * 10).max())


def test_ridges_are_sixty_at_most_with_the_first_and_the_last(tmp_path: Path) -> None:
    write(tmp_path / "run", *(make_frame(step, {A: [1.0, -step]}) for step in range(150)))
    ridges = Tab(tmp_path).ask("history", run="run", kind="activation", path="a").json["ridges"]
    assert len(ridges["steps"]) == len(ridges["counts"]) == 60
    assert (ridges["steps"][0], ridges["steps"][-1]) == (0, 149)
    assert set(np.diff(ridges["steps"])) == {2, 3}


# --- Findings ---


def test_a_trouble_that_was_found_again_is_one_entry_and_the_worst_come_first(tmp_path: Path) -> None:
    def found(step: int, rule: str, severity: Any, site: Site | None, **evidence: float) -> Finding:
        return Finding(step, site, rule, severity, f"{rule} at {step}", evidence)

    frames = [
        make_frame(0, findings=[found(0, "loss_spike", "info", None, loss=math.inf)]),
        make_frame(1, findings=[found(1, "dead_units", "warning", A), found(1, "dead_units", "warning", B)]),
        make_frame(2, findings=[found(2, "non_finite", "error", A, nan_count=3)]),
        make_frame(3, findings=[found(3, "dead_units", "error", A)]),
    ]
    write(tmp_path / "run", *frames)
    tab = Tab(tmp_path)
    answer = tab.ask("findings", run="run").json["findings"]
    assert [(one["onset"], one["last"], one["count"], one["rule"], one["severity"]) for one in answer] == [
        (1, 3, 2, "dead_units", "error"),
        (2, 2, 1, "non_finite", "error"),
        (1, 1, 1, "dead_units", "warning"),
        (0, 0, 1, "loss_spike", "info"),
    ]
    assert answer[0]["message"] == "dead_units at 3"
    assert answer[0]["site"] == {"path": "a", "kind": "activation", "index": "", "name": "a"}
    assert answer[3]["site"] is None
    assert answer[3]["evidence"] == {"loss": "inf"}
    assert tab.ask("runs").json["runs"][0]["findings"] == 1


def test_a_run_without_findings_has_an_empty_list(tab: Tab) -> None:
    assert tab.ask("findings", run="one").json == {"findings": []}


# --- What anybody may have written ---


HOSTILE = {
    "no JSON": b"{",
    "not UTF-8": b"\xff\xfe\x00",
    "nothing": b"",
    "a list": b"[1]",
    "deep": b"[" * 100_000,
    "another version": description(version=3),
    "columns of another version": description(version=1),
    "no version": description(version=None),
    "another kind": description("gradient"),
    "no kind": description("../../etc"),
    "no sites": description(sites=None),
    "numbers for names": description(sites=[[1, 2]]),
    "a site twice": description(sites=[["a", ""], ["a", ""]]),
    "half a character": description(sites=[["\ud800", ""]]),
    "a name without end": description(sites=[["x" * 100_000, ""]]),
    "other columns": description(columns=["count"]),
    "buckets under the rows' name": description(encoding="zlib of a .npy array [sites, buckets]"),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_tag_whose_description_does_not_read_is_left_out(tmp_path: Path, content: bytes) -> None:
    write_values(tmp_path / "run", (0, "tbhooks/activation", ROWS, content))
    write_values(tmp_path / "good", (0, "tbhooks/activation", ROWS, description()))
    tab = Tab(tmp_path)
    assert [run["name"] for run in tab.ask("runs").json["runs"]] == ["good"]
    assert tab.ask("matrix", run="run", kind="activation", stat="mean").status == 400
    assert tab.ask("matrix", run="good", kind="activation", stat="mean").matrix[1].shape == (1, 1)


@pytest.mark.parametrize(
    "tag",
    [
        "tbhooks/activation.buckets",
        "tbhooks/activation.0",
        "tbhooks/activation.x",
        "tbhooks/",
        "activation",
        "tbhooks/a/b",
    ],
)
def test_a_tag_of_another_name_is_left_out(tmp_path: Path, tag: str) -> None:
    write_values(tmp_path / "run", (0, tag, ROWS, description()))
    assert Tab(tmp_path).ask("runs").json["runs"] == []


def bad_tensors() -> dict[str, Any]:
    lying, unknown = rows_tensor(DATA[A]), rows_tensor(DATA[A])
    lying.tensor_shape.dim[0].size = 1000
    unknown.dtype = types_pb2.DT_RESOURCE  # NumPy has no type for it
    negative = np.ones((1, 11), dtype=np.float32)
    negative[0, 5] = -1
    return {
        "too many rows": rows_tensor(DATA[A], DATA[B]),
        "no rows": rows_tensor(),
        "other columns": tensor_util.make_tensor_proto(np.zeros((1, 8), dtype=np.float32)),
        "float64": tensor_util.make_tensor_proto(np.zeros((1, 11))),
        "a number": tensor_util.make_tensor_proto(1.0),
        "text": tensor_util.make_tensor_proto("text"),
        "fewer zeros than none": tensor_util.make_tensor_proto(negative),
        "a lie about its shape": lying,
        "a type without arrays": unknown,
    }


@pytest.mark.parametrize("tensor", bad_tensors().values(), ids=bad_tensors())
def test_a_value_that_is_not_what_was_announced_is_left_out(tmp_path: Path, tensor: Any) -> None:
    write_values(
        tmp_path / "run", (0, "tbhooks/activation", ROWS, description()), (1, "tbhooks/activation", tensor, None)
    )
    tab = Tab(tmp_path)
    for stat in ("mean", "norm", "p50"):
        _, values = tab.ask("matrix", run="run", kind="activation", stat=stat).matrix
        assert np.isnan(values[1:]).all()
    assert tab.ask("history", run="run", kind="activation", path="a").status == 200
    assert tab.ask("distribution", run="run", kind="activation", path="a", step=0).status in (200, 404)


def test_histograms_that_are_none_cost_themselves_alone(tmp_path: Path) -> None:
    packed = description(encoding="zlib of a .npy array [sites, buckets]")
    good, other = counts_tensor(DATA[A]), counts_tensor(DATA[A], DATA[A])
    given = [
        good,
        tensor_util.make_tensor_proto("no zlib"),
        other,
        ROWS,
        tensor_util.make_tensor_proto(["a", "b"]),
        good,
    ]
    rows = [(step, "tbhooks/activation", ROWS, None if step else description()) for step in range(len(given))]
    counts = [(i, "tbhooks/activation.buckets", one, None if i else packed) for i, one in enumerate(given)]
    write_values(tmp_path / "run", *rows, *counts)
    tab = Tab(tmp_path)
    assert tab.ask("matrix", run="run", kind="activation", stat="mean").matrix[0]["steps"] == [0, 1, 2, 3, 4, 5]
    assert tab.ask("history", run="run", kind="activation", path="a").json["quantile_steps"] == [0, 5]
    assert tab.ask("distribution", run="run", kind="activation", path="a", step=2).json["histogram_step"] == 0


def test_findings_that_are_none_are_left_out(tmp_path: Path) -> None:
    good = json.dumps([Finding(1, A, "dead_units", "error", "<b>dead</b>", {}).to_dict()])
    deep = good.replace('"evidence": {}', f'"evidence": {{"a": {"[" * 30_000}{"]" * 30_000}}}')
    bad = ("{", "[1]", '[{"step": "x"}]', "[" * 100_000, "null", deep)
    texts = [good, *bad, good]
    values = [(i, "tbhooks/findings", tensor_util.make_tensor_proto(text), b"") for i, text in enumerate(texts)]
    write_values(tmp_path / "run", *values, (99, "tbhooks/findings", ROWS, None))
    (answer,) = Tab(tmp_path).ask("findings", run="run").json["findings"]
    assert (answer["count"], answer["message"]) == (1, "<b>dead</b>"), "both are of one step"


def test_more_than_memory_holds_is_refused_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LARGEST", 100)
    write(tmp_path / "run", *(make_frame(step, {A: DATA[A]}) for step in range(3)))
    reply = Tab(tmp_path).ask("matrix", run="run", kind="activation", stat="mean")
    assert reply.status == 400
    assert "3 steps of 1 sites" in reply.text


# --- What TensorBoard's loaders do under our hands ---


class _TooLarge(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED


class _Gone(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


def reading_with(tab: Tab, monkeypatch: pytest.MonkeyPatch, fail: Callable[[int], Exception | None]) -> list[int]:
    """Has reads fail as the data server's client does; returns how many values were asked for each time."""
    read, asked = tab.provider.read_tensors, []

    def read_tensors(*args: Any, downsample: int, **kwargs: Any) -> Any:
        asked.append(downsample)
        problem = fail(downsample)
        if problem is not None:
            raise problem
        return read(*args, downsample=downsample, **kwargs)

    monkeypatch.setattr(tab.provider, "read_tensors", read_tensors)
    return asked


def test_what_is_too_large_for_one_answer_comes_thinned_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run", *(make_frame(step, {A: [step]}) for step in range(100)))
    tab = Tab(tmp_path)
    monkeypatch.setattr(provider, "LARGEST_MESSAGE", 100 * (44 + 100))
    asked = reading_with(tab, monkeypatch, lambda most: _TooLarge() if most > 30 else None)
    header, values = tab.ask("matrix", run="run", kind="activation", stat="mean").matrix
    assert asked[1:] == [1, 100, 50, 25]
    assert header["thinned"] is True
    assert len(header["steps"]) == 25
    assert header["steps"][-1] == 99, "the last one is always there"
    assert values[:, 0].tolist() == header["steps"]


def test_a_data_server_that_does_not_answer_is_reported_and_asked_again(
    tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    tab.open()
    with monkeypatch.context() as patch:
        reading_with(tab, patch, lambda _: _Gone())
        reply = tab.ask("matrix", run="one", kind="activation", stat="mean")
        assert (reply.status, reply.text) == (503, "TensorBoard's data server does not respond: UNAVAILABLE")
    assert len(tab.ask("matrix", run="one", kind="activation", stat="mean").matrix[0]["steps"]) == 10


def test_more_runs_than_fit_into_one_answer_are_listed_one_by_one(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    every, asked = tab.provider.list_tensors, []

    def list_tensors(*args: Any, run_tag_filter: Any, **kwargs: Any) -> Any:
        asked.append(run_tag_filter and set(run_tag_filter.runs))
        if run_tag_filter is None:
            raise _TooLarge
        return every(*args, run_tag_filter=run_tag_filter, **kwargs)

    before = tab.ask("runs").json["runs"]
    monkeypatch.setattr(tab.provider, "list_tensors", list_tensors)
    assert tab.ask("runs").json["runs"] == before
    assert asked == [None, {"one"}, {"updates"}]


def test_a_log_directory_that_cannot_be_listed_is_reported_in_a_sentence(
    tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_tensors(*_: Any, **__: Any) -> None:
        raise _Gone

    monkeypatch.setattr(tab.provider, "list_tensors", list_tensors)
    reply = tab.ask("runs")
    assert (reply.status, reply.text) == (503, "TensorBoard cannot list the log directory at the moment: UNAVAILABLE")


def test_a_tag_whose_values_are_not_there_yet_is_waited_for(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    tab.open()
    waited = iter([KeyError("tbhooks/activation"), None])
    reading_with(tab, monkeypatch, lambda _: next(waited))
    assert len(tab.ask("matrix", run="one", kind="activation", stat="mean").matrix[0]["steps"]) == 10


def test_a_tag_that_is_listed_before_its_first_value_is_left_out() -> None:
    def series(step: int | None) -> Any:
        return provider_types.TensorTimeSeries(
            max_step=step, max_wall_time=step, plugin_content=description(), description="", display_name=""
        )

    assert index.read({"run": {"tbhooks/activation": series(None)}}) == {}
    assert index.read({"run": {"tbhooks/activation": series(0)}})["run"].last_step == 0


def test_a_run_that_is_gone_is_missing_and_one_that_never_was_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run", make_frame(0))
    tab = Tab(tmp_path)
    assert tab.ask("findings", run="run").status == 200
    monkeypatch.setattr(tab.provider, "list_tensors", lambda *_, **__: {})
    reply = tab.ask("findings", run="run")
    assert (reply.status, reply.text) == (404, "run 'run' is no longer in the log directory")
    assert tab.ask("findings", run="other").status == 400


# --- What is kept ---


def test_the_questions_of_one_click_list_the_run_once(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, list_tensors = [], tab.provider.list_tensors
    monkeypatch.setattr(
        tab.provider, "list_tensors", lambda *args, **named: listed.append(1) or list_tensors(*args, **named)
    )
    monkeypatch.setattr(store, "LISTING_S", 3600.0)
    tab.ask("runs")
    for _ in range(3):
        assert tab.ask("history", run="one", kind="activation", path="a").status == 200
        assert tab.ask("distribution", run="one", kind="activation", path="a", step=10).status == 200
    assert len(listed) == 1
    monkeypatch.setattr(store, "LISTING_S", 0.0)
    tab.ask("history", run="one", kind="activation", path="a")
    assert len(listed) == 2


def test_a_stat_of_several_columns_is_computed_once_until_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, row_matrix = [], store.row_matrix
    monkeypatch.setattr(store, "row_matrix", lambda name, rows: computed.append(name) or row_matrix(name, rows))
    monkeypatch.setattr(store, "LISTING_S", 0.0)
    sink = TensorBoardSink(tmp_path / "run", scalars=())
    sink.write(make_frame(0, {A: [3.0, 4.0]}))
    sink.flush()
    tab = Tab(tmp_path)
    question = {"run": "run", "kind": "activation"}
    for _ in range(2):
        assert tab.ask("matrix", **question, stat="norm").matrix[1].tolist() == [[5.0]]
        assert tab.ask("matrix", **question, stat="abs_max", after=0).matrix[1].tolist() == []
    assert computed == ["norm", "abs_max"]
    sink.write(make_frame(1, {A: [6.0, 8.0]}))
    sink.close()
    tab.reload()
    assert tab.ask("matrix", **question, stat="norm").matrix[1].tolist() == [[5.0], [10.0]]
    assert computed == ["norm", "abs_max", "norm"]


def test_tensors_are_read_once_until_there_are_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = TensorBoardSink(tmp_path / "run", scalars=())
    for step in range(3):
        sink.write(make_frame(step, {A: DATA[A] * (step + 1)}))
    sink.flush()
    tab = Tab(tmp_path)
    asked = reading_with(tab, monkeypatch, lambda _: None)
    for stat in ("mean", "std", "norm", "mean"):
        tab.ask("matrix", run="run", kind="activation", stat=stat)
    assert len(asked) == 1
    for stat in ("p50", "p50", "p99"):
        tab.ask("matrix", run="run", kind="activation", stat=stat)
    tab.ask("history", run="run", kind="activation", path="a")
    assert len(asked) == 2
    before = {stat: tab.ask("matrix", run="run", kind="activation", stat=stat).matrix[1] for stat in ("mean", "p50")}

    sink.write(make_frame(3, {A: DATA[A] * 4}))
    sink.flush()
    tab.reload()
    for stat, array in before.items():
        header, values = tab.ask("matrix", run="run", kind="activation", stat=stat).matrix
        assert header["steps"] == [0, 1, 2, 3]
        assert values[:3].tobytes() == array.tobytes()
        assert values[3, 0] == pytest.approx(4 * array[0, 0], rel=0.02)
    assert len(asked) == 4

    again = make_frame(3, {A: DATA[A] * 8})
    sink.write(Frame(3, again.time + 100, 0, again.sites, again.values, again.buckets))
    sink.close()
    tab.reload()
    for stat, array in before.items():
        _, values = tab.ask("matrix", run="run", kind="activation", stat=stat).matrix
        assert values[3, 0] == pytest.approx(8 * array[0, 0], rel=0.02), "written again"


def kilobytes(n: int) -> Callable[[Any], NDArray[np.uint8]]:
    return lambda _: np.zeros(n << 10, dtype=np.uint8)


def test_the_cache_stays_within_its_budget_and_forgets_the_least_used() -> None:
    cache, made = Cache(10 << 10), []

    def get(key: str, version: int = 0, size: int = 4) -> Any:
        return cache.get(key, version, lambda _: made.append(key) or kilobytes(size)(None))

    get("a"), get("b"), get("a"), get("c")
    assert cache.nbytes <= 10 << 10
    get("a"), get("c")
    assert made == ["a", "b", "c"]
    get("b")
    assert made == ["a", "b", "c", "b"]
    get("b", version=1, size=1)
    assert cache.nbytes == 5 << 10
    get("huge", size=11)
    get("huge", size=11)
    assert made[-2:] == ["huge", "huge"]
    assert cache.nbytes == 5 << 10


def test_an_older_version_is_there_to_make_the_newer_one_from() -> None:
    cache, given = Cache(1 << 20), []
    first = cache.get("key", 1, kilobytes(1))
    cache.get("key", 2, lambda old: given.append(old) or kilobytes(1)(None))
    assert given[0] is first


def test_what_fails_is_not_kept() -> None:
    cache = Cache(1 << 20)
    with pytest.raises(OSError, match="broken"):
        cache.get("key", 1, lambda _: (_ for _ in ()).throw(OSError("broken")))
    assert cache.get("key", 1, kilobytes(1)).nbytes == 1 << 10


def test_threads_that_ask_for_the_same_wait_for_one_of_them_to_make_it() -> None:
    cache, made, start = Cache(1 << 20), [], threading.Barrier(8)

    def ask(i: int) -> Any:
        start.wait()
        return cache.get(i % 2, 0, lambda _: made.append(i) or kilobytes(64)(None))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len(made) == 2
    assert len({id(array) for array in found}) == 2
    assert cache.nbytes == 128 << 10


def test_many_threads_within_a_small_budget_get_what_they_asked_for() -> None:
    cache = Cache(8 << 10)

    def ask(i: int) -> bool:
        key, version = i % 7, i // 50
        array = cache.get(key, version, lambda _: np.full(1 << 10, key, dtype=np.int16))
        return bool((array == key).all()) and cache.nbytes <= 8 << 10

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(2000)))


def test_a_dump_of_the_flight_recorder_is_a_map_of_parameters_by_its_steps(tmp_path: Path) -> None:
    norms = np.array([[1.0, 2.0], [math.inf, 3.0], [math.nan, 4.0]])
    flight = Flight(8, 1e9, 0, "a reason", np.array([5, 6, 7]), {}, ("a.weight", "b.weight"), norms, norms.sum(axis=1))
    frame = make_frame(8, {A: DATA[A]})
    write(tmp_path / "run", frame, replace(make_frame(8, {}), artifacts=(flight,)))
    tab = Tab(tmp_path)
    kinds = {kind["kind"]: kind for kind in tab.ask("runs").json["runs"][0]["kinds"]}
    assert kinds["flight"]["stats"] == ["norm"]
    header, values = tab.ask("matrix", run="run", kind="flight", stat="norm").matrix
    assert header["steps"] == [5, 6, 7]
    assert header["nonfinite"] == [[1, 0]]
    assert np.array_equal(values, np.array([[1.0, 2.0], [math.nan, 3.0], [math.nan, 4.0]], "f4"), equal_nan=True)
    sites = tab.ask("sites", run="run", kind="flight").json["sites"]
    assert [site["path"] for site in sites] == ["a.weight", "b.weight"]


def with_metrics(step: int) -> Frame:
    """Two modules with a metric each (the second is infinite at step 2), and a vector of three numbers at the first."""
    data = {Site(f"layers.{i}", kind): RNG.normal(size=40) for kind in ("activation", "gradient") for i in range(3)}
    scalars = {f"metric.spread/layers.{i}": 10.0 * step + i for i in range(2)}
    scalars["metric.spread/layers.1"] += math.inf if step == 2 else 0.0
    scalars |= {f"metric.heads/layers.0[{i}]": float(step + i) for i in range(3)}
    scalars |= {"activation.write_ratio/layers.2": 0.5, "train/loss": 1.0}
    metrics = {"metric.spread": "activation", "metric.heads": "activation"}
    return replace(make_frame(step, data, histograms=False, scalars=scalars), metrics=metrics)


def test_metrics_are_stats_of_their_kind_and_vectors_are_maps_of_elements(tmp_path: Path) -> None:
    write(tmp_path / "run", *(with_metrics(step) for step in range(3)))
    tab = Tab(tmp_path)
    kinds = {kind["kind"]: kind for kind in tab.ask("runs").json["runs"][0]["kinds"]}
    assert kinds["activation"]["stats"][-2:] == ["metric.spread", "write_ratio"]
    assert kinds["element.activation"]["stats"] == ["metric.heads"]
    assert not [name for name in kinds if name.startswith("metric.")]
    header, values = tab.ask("matrix", run="run", kind="activation", stat="metric.spread").matrix
    np.testing.assert_array_equal(values, [[0, 1, math.nan], [10, 11, math.nan], [20, math.nan, math.nan]])
    assert header["nonfinite"] == [[2, 1]]
    _, values = tab.ask("matrix", run="run", kind="element.activation", stat="metric.heads").matrix
    np.testing.assert_array_equal(values, [[0, 1, 2], [1, 2, 3], [2, 3, 4]])
    sites = tab.ask("sites", run="run", kind="element.activation").json["sites"]
    assert [site["name"] for site in sites] == ["layers.0[0]", "layers.0[1]", "layers.0[2]"]


def test_a_site_has_its_metrics_in_its_history_and_its_stats(tmp_path: Path) -> None:
    write(tmp_path / "run", *(with_metrics(step) for step in range(3)))
    tab, where = Tab(tmp_path), {"run": "run", "kind": "activation", "path": "layers.1"}
    answer = tab.ask("history", **where).json
    assert answer["stats"]["metric.spread"] == [1.0, 11.0, "inf"]
    assert decoded_history(tab.ask("history", **where, form="binary").content) == answer
    assert tab.ask("distribution", **where, step=1).json["stats"]["metric.spread"] == 11.0
    element = {"run": "run", "kind": "element.activation", "path": "layers.0", "index": "[2]"}
    assert tab.ask("history", **element).json["stats"] == {"metric.heads": [2.0, 3.0, 4.0]}
    assert tab.ask("distribution", **element, step=1).json["stats"] == {"metric.heads": 3.0}


def test_the_gain_of_gradients_is_that_of_numpy(tmp_path: Path) -> None:
    frames = [with_metrics(step) for step in range(3)]
    write(tmp_path / "run", *frames)
    tab = Tab(tmp_path)
    _, values = tab.ask("matrix", run="run", kind="gradient", stat="gain").matrix
    rms = np.array([[frame[f"layers.{i}", "gradient"].rms for i in range(3)] for frame in frames])
    assert np.isnan(values[:, 0]).all()
    np.testing.assert_allclose(values[:, 1:], rms[:, :-1] / rms[:, 1:], rtol=1e-5)
    history = tab.ask("history", run="run", kind="gradient", path="layers.2").json["stats"]["gain"]
    np.testing.assert_allclose(history, rms[:, 1] / rms[:, 2], rtol=1e-5)
    refused = tab.ask("matrix", run="run", kind="activation", stat="gain")
    assert refused.status == 400
    assert "only gradients" in refused.text


def test_the_samples_of_the_nearest_step_are_sent(tmp_path: Path) -> None:
    samples = Samples((Sample("a", math.inf, "web"), Sample(7, 2.0, "web")), {"web": Group(2.5, 4)}, 4)
    later = Samples((Sample("b", 1.0),), {}, 1)
    sampled = [replace(make_frame(10), samples=samples), make_frame(20), replace(make_frame(30), samples=later)]
    write(tmp_path / "run", make_frame(0), *sampled)
    write(tmp_path / "without", make_frame(0))
    tab = Tab(tmp_path)
    answer = tab.ask("samples", run="run", step=18).json
    worst = [["a", "inf", "web", None], [7, 2.0, "web", None]]
    assert answer == {"step": 10, "worst": worst, "groups": {"web": [2.5, 4]}, "total": 4}
    assert tab.ask("samples", run="run", step=21).json["step"] == 30
    assert tab.ask("samples", run="without", step=0).json == {"step": None}


def test_finished_failed_and_other_runs_are_told_apart(tmp_path: Path) -> None:
    for outcome in ("finished", "failed", "", "unknown"):
        sink = TensorBoardSink(tmp_path / f"run {outcome}", scalars=())
        sink.write(make_frame(0))
        sink.outcome = outcome
        sink.close()
    resumed = TensorBoardSink(tmp_path / "run resumed", scalars=())
    resumed.write(make_frame(0))
    resumed.outcome = "finished"
    resumed.close()
    write(tmp_path / "run resumed", replace(make_frame(1), time=time.time() + 1))
    listed = {run["name"].removeprefix("run").strip(): run for run in Tab(tmp_path).ask("runs").json["runs"]}
    assert {name: run["state"] for name, run in listed.items()} == {
        "finished": "finished", "failed": "failed", "": "ended", "unknown": "ended", "resumed": "ended",
    }  # fmt: skip
    assert [name for name, run in listed.items() if run["has_ended"]] == ["failed", "finished", "unknown"]
