"""The tab in a real TensorBoard, under both of its loaders: every step that was written, to the bit, while it grows."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tensorboard.compat.proto import event_pb2, summary_pb2, types_pb2
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.plugin.server import STATIC, STYLES
from tbhooks.sinks.tensorboard import STORED_COLUMNS, TensorBoardSink
from tests.support import frames, reference
from tests.support.frames import make_frame, write_run
from tests.support.tensorboard_server import Server

# In one process: each would start servers of its own.
pytestmark = pytest.mark.xdist_group("plugin_server")

STEPS, MANY = 1500, 40
OWN_SCALARS = 60
LOADERS = {
    "load_fast": ["--load_fast=true"],
    "load_slow": ["--load_fast=false", "--path_prefix=/pre/fix"],
}
HOSTILE_NAMES = (
    "<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "a\"b'c&d", "__proto__", "слой.0",
    "../../etc/passwd", "a\nb\x00c", "x" * 3000, "", "%2e%2e", "🦊",
)  # fmt: skip
STORED_AS = {
    "count": 0,
    "mean": 1,
    "std": 2,
    "min": 3,
    "max": 4,
    "nan_count": 6,
    "inf_count": 7,
    "skewness": 9,
    "kurtosis": 10,
}


# --- Runs ---


def frame_at(step: int) -> Frame:
    """Five sites of two kinds, one of which is missing now and then, one of which is NaN late."""
    generator = np.random.default_rng(step)
    data: dict[Site, Any] = {Site(f"layer.{i}", "activation"): generator.normal(size=20) * 10.0**-i for i in range(3)}
    if step % 7 == 3:
        del data[Site("layer.1", "activation")]
    if step >= 1400:
        data[Site("layer.2", "activation")] = np.array([1.0, math.nan, math.inf])
    data[Site("w", "weight")] = generator.normal(size=9)
    data[Site("w", "update")] = generator.normal(size=9) * 1e-3
    return make_frame(step, data, histograms=step % 50 == 0)


def train(directory: Path) -> None:
    """A real training with evaluation passes."""
    model = frames.make_model()
    with tbhooks.watch(model, str(directory), every=1).evaluation():
        for _ in range(3):
            frames.train(model, 2)
            model.eval()
            model(frames.torch.randn(4, 4))
            model.train()


def write_hostile(directory: Path) -> None:
    """Beside honest activations: tags whose descriptions are none, and tensors that are not what was announced."""
    described = {"version": 2, "kind": "gradient", "sites": [["a", ""]], "columns": list(STORED_COLUMNS)}
    lying = tensor_util.make_tensor_proto(np.zeros((1, 11), dtype=np.float32))
    lying.tensor_shape.dim[0].size = 77
    resource = tensor_util.make_tensor_proto(np.zeros((1, 11), dtype=np.float32))
    resource.dtype = types_pb2.DT_RESOURCE
    values = [
        ("tbhooks/weight", np.zeros((1, 11), dtype=np.float32), b"{"),
        ("tbhooks/update", np.zeros((1, 11), dtype=np.float32), json.dumps(described | {"version": 99}).encode()),
        ("tbhooks/gradient", np.zeros((3, 2), dtype=np.float32), json.dumps(described).encode()),
        ("tbhooks/input", lying, json.dumps(described | {"kind": "input"}).encode()),
        ("tbhooks/functional", resource, json.dumps(described | {"kind": "functional"}).encode()),
        ("tbhooks/findings", "{]", b""),
    ]
    sites = {Site(name, "activation"): [1.0, 2.0] for name in HOSTILE_NAMES}
    with SummaryWriter(str(directory)) as writer:
        sink = TensorBoardSink(writer, scalars=())
        sink.write(make_frame(0, sites, findings=[Finding(0, None, "mine", "info", HOSTILE_NAMES[0])]))
        for tag, given, content in values:
            tensor = tensor_util.make_tensor_proto(given) if isinstance(given, str | np.ndarray) else given
            value = summary_pb2.Summary.Value(tag=tag, tensor=tensor)
            value.metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
            value.metadata.plugin_data.plugin_name = "tbhooks"
            value.metadata.plugin_data.content = content
            event = event_pb2.Event(step=1, wall_time=1e9, summary=summary_pb2.Summary(value=[value]))
            writer._get_file_writer().event_writer.add_event(event)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is copied below each server's log directory."""
    directory = tmp_path_factory.mktemp("written")
    write_run(directory / "long", *map(frame_at, range(STEPS)), scalars=())
    train(directory / "trained")
    write_hostile(directory / "hostile")
    for i in range(MANY):
        write_run(directory / f"many/{i}", make_frame(i, histograms=False), scalars=())
    with SummaryWriter(str(directory / "scalars only")) as writer:
        for step in range(OWN_SCALARS):
            writer.add_scalar("mine/loss", 1.0 / (step + 1), step)
    return directory


# --- Servers ---


def is_complete(listed: list[dict[str, Any]]) -> bool:
    """Whether TensorBoard has read the last value of every run."""
    newest = {(run["name"], kind["kind"]): kind["last_step"] for run in listed for kind in run["kinds"]}
    last = {("long", "update"): STEPS - 1, ("trained", "eval.activation"): 5, ("hostile", "functional"): 1}
    return len(listed) == 3 + MANY and all(newest.get(key) == step for key, step in last.items())


@pytest.fixture(scope="module", params=LOADERS.values(), ids=LOADERS)
def server(request: pytest.FixtureRequest, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts over scalars alone, sees that the tab is quiet, and only then gets runs with data of ours."""
    directory = tmp_path_factory.mktemp("logs")
    shutil.copytree(runs / "scalars only", directory / "scalars only")
    log = tmp_path_factory.mktemp("printed") / "log"
    with Server(directory, log, "--samples_per_plugin=scalars=20", *request.param) as serving:
        mine = {"run": "scalars only", "tag": "mine/loss"}
        serving.wait_for(lambda: serving.get("plugin/scalars/scalars", **mine).status == 200)
        assert serving.tab()["enabled"] is False, "no run holds anything of ours"
        assert serving.ask("runs").json["runs"] == []
        shutil.copytree(runs, directory, dirs_exist_ok=True)
        serving.wait_for(lambda: is_complete(serving.ask("runs").json["runs"]))
        yield serving


# --- The tab ---


def test_the_tab_is_there_once_a_run_holds_data_of_ours(server: Server) -> None:
    tab = server.tab()
    assert tab["enabled"] is True
    assert tab["loading_mechanism"]["type"] == "IFRAME"
    assert tab["loading_mechanism"]["module_path"].endswith("/data/plugin/tbhooks/tab.js")
    page = server.get("plugin_entry.html", name="tbhooks")
    assert b'import("./tab.js")' in page.content


CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css"}


def test_every_file_that_a_script_or_the_entry_refers_to_is_there() -> None:
    reference = re.compile(r'(?:from |URL\(|href=|src=)["`]([^"`#]+\.(?:js|css|html))')
    referred = {
        (source.parent / name).resolve()
        for source in (*STATIC.rglob("*.js"), *STATIC.rglob("*.html"))
        for name in reference.findall(source.read_text(encoding="utf-8"))
    }
    files = {path.resolve() for path in STATIC.rglob("*") if path.is_file()}
    assert referred - {(STATIC / "tab.css").resolve()} <= files
    unnamed = {(STATIC / name).resolve() for name in ("index.js", *STYLES)}  # parts of tab.js and tab.css
    assert files - referred - unnamed == set(), "files that nothing loads"


def test_every_file_of_the_page_is_served_and_nothing_beside(server: Server) -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert STATIC / "index.js" in files
    for path in files:
        reply = server.ask(path.relative_to(STATIC).as_posix())
        assert (reply.status, reply.content) == (200, path.read_bytes())
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        if path.suffix in CONTENT_TYPES:
            assert reply.headers["Content-Type"].split(";")[0] == CONTENT_TYPES[path.suffix]
    for outside in ("server.py", "../server.py", "%2e%2e/server.py", "static/index.js", "index.js/..", "", "."):
        assert server.ask(outside).status == 404, outside


# --- What was written is what is served ---


@pytest.fixture(scope="module")
def stored(runs: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors of the long run by tag, [steps, sites, columns], from the event file itself."""
    tensors: dict[str, list[NDArray[np.float32]]] = {}
    for step, event in enumerate(event for event in frames.events(runs / "long") if event.HasField("summary")):
        assert event.step == step
        for value in event.summary.value:
            if value.tensor.dtype == types_pb2.DT_FLOAT and value.HasField("tensor"):
                shape = [dim.size for dim in value.tensor.tensor_shape.dim]
                tensors.setdefault(value.tag, []).append(
                    np.frombuffer(value.tensor.tensor_content, "<f4").reshape(shape)
                )
    return {tag: np.array(arrays) for tag, arrays in tensors.items()}


def test_every_step_that_was_written_is_served_to_the_bit(
    server: Server, stored: dict[str, NDArray[np.float32]]
) -> None:
    assert set(stored) == {"tbhooks/activation", "tbhooks/weight", "tbhooks/update"}
    for tag, written in stored.items():
        assert len(written) == STEPS
        seen = written[:, :, 0] > 0
        for stat, column in STORED_AS.items():
            header, values = server.ask("matrix", run="long", kind=tag.removeprefix("tbhooks/"), stat=stat).matrix
            assert header["steps"] == list(range(STEPS))
            assert values[seen].tobytes() == written[:, :, column][seen].tobytes(), (tag, stat)
            assert np.isnan(values[~seen]).all()


def test_derived_stats_are_what_numpy_says(server: Server) -> None:
    for stat in ("norm", "rms", "abs_max", "zero_fraction"):
        _, values = server.ask("matrix", run="long", kind="activation", stat=stat).matrix
        for step in (0, 10, 777, STEPS - 1):
            generator = np.random.default_rng(step)
            arrays = [generator.normal(size=20) * 10.0**-i for i in range(3)]
            wanted = [reference.stats(array)[stat] for array in arrays]
            assert values[step, 0] == pytest.approx(wanted[0], rel=2e-6)
            if step % 7 != 3:
                assert values[step, 1] == pytest.approx(wanted[1], rel=2e-6)
    header, _ = server.ask("matrix", run="long", kind="activation", stat="max").matrix
    assert header["nonfinite"] == [[step, 2] for step in range(1400, STEPS)]


def test_histograms_are_served_as_they_were_counted(server: Server) -> None:
    header, values = server.ask("matrix", run="long", kind="activation", stat="p50").matrix
    assert header["steps"] == list(range(0, STEPS, 50))
    assert values.shape == (STEPS // 50, 3)
    answer = server.ask("distribution", run="long", kind="activation", path="layer.0", index="", step=512).json
    array = np.random.default_rng(500).normal(size=20)
    assert (answer["row_step"], answer["histogram_step"]) == (512, 500)
    assert answer["counts"] == np.trim_zeros(reference.bucket_counts(array)).tolist()
    assert [answer["edges"][0], answer["edges"][-1]] == [np.float32(array.min()), np.float32(array.max())]
    answer = server.ask("history", run="long", kind="activation", path="layer.1").json
    assert len(answer["steps"]) == STEPS
    assert answer["stats"]["mean"][3] is None
    assert len(answer["ridges"]["steps"]) == len(answer["quantile_steps"])


def test_evaluation_passes_are_kinds_of_their_own(server: Server) -> None:
    (trained,) = [run for run in server.ask("runs").json["runs"] if run["name"] == "trained"]
    kinds = [kind["kind"] for kind in trained["kinds"]]
    assert kinds == ["activation", "gradient", "weight", "weight_gradient", "update", "eval.activation"]
    header, values = server.ask("matrix", run="trained", kind="eval.activation", stat="std").matrix
    assert values.shape == (3, 4)
    assert np.isfinite(values).all()
    assert header["steps"] == [1, 3, 5]


def test_what_the_user_said_of_other_plugins_stays(server: Server) -> None:
    mine = server.get("plugin/scalars/scalars", run="scalars only", tag="mine/loss").json
    assert len(mine) == 20


def test_a_question_put_wrongly_is_refused_with_a_sentence(server: Server) -> None:
    for route, parameters, sentence in (
        ("runs", {"a": 1}, "unknown parameter 'a': this route has none"),
        ("sites", {"run": "long"}, "parameter 'kind' is missing"),
        ("sites", {"run": "lang", "kind": "weight"}, "unknown run 'lang': did you mean 'long'?"),
        ("findings", {"run": "scalars only"}, "unknown run 'scalars only': choose from "),
        ("matrix", {"run": "long", "kind": "weigth", "stat": "mean"}, "unknown kind 'weigth': did you mean 'weight'"),
        ("matrix", {"run": "long", "kind": "weight", "stat": "men"}, "unknown stat 'men': did you mean 'mean'"),
        ("matrix", {"run": "long", "kind": "weight", "stat": "ratio"}, "only updates have 'ratio'"),
        ("matrix", {"run": "long", "kind": "weight", "stat": "mean", "after": "x"}, "after must be an integer"),
        ("history", {"run": "long", "kind": "weight", "path": "v"}, "unknown path of weight 'v': choose from 'w'"),
    ):
        reply = server.ask(route, **parameters)
        assert reply.status == 400
        assert reply.content.decode().startswith(sentence)
        assert reply.headers["Content-Type"].startswith("text/plain")


# --- Anybody may write an event file ---


def test_hostile_names_come_through_as_text(server: Server) -> None:
    sites = server.ask("sites", run="hostile", kind="activation").json["sites"]
    assert tuple(site["path"] for site in sites) == HOSTILE_NAMES
    for name in HOSTILE_NAMES:
        if "\x00" not in name:
            answer = server.ask("distribution", run="hostile", kind="activation", path=name, step=0).json
            assert answer["counts"] == [1, 0, 1]
    assert server.ask("findings", run="hostile").json["findings"][0]["message"] == HOSTILE_NAMES[0]


def test_a_hostile_file_costs_its_own_tags_alone(server: Server) -> None:
    (hostile,) = [run for run in server.ask("runs").json["runs"] if run["name"] == "hostile"]
    kinds = [kind["kind"] for kind in hostile["kinds"]]
    assert kinds == ["activation", "gradient", "input", "functional"]
    for kind in kinds[1:]:
        for stat in ("mean", "norm", "p50"):
            assert server.ask("matrix", run="hostile", kind=kind, stat=stat).matrix[1].size == 0
        assert server.ask("distribution", run="hostile", kind=kind, path="a", step=0).status == 404
        assert server.ask("history", run="hostile", kind=kind, path="a").json["steps"] == []
    assert server.ask("matrix", run="hostile", kind="weight", stat="mean").status == 404
    assert "Traceback" not in server.output


# --- A log directory lives ---


def test_steps_of_a_running_writer_arrive_and_only_those_when_asked_for(server: Server) -> None:
    sink = TensorBoardSink(server.directory / "growing", scalars=())
    site = Site("a", "activation")
    for step in range(5):
        sink.write(make_frame(step, {site: [float(step)]}))
    sink.flush()
    server.wait_for(lambda: server.newest().get("growing") == 4)
    header, values = server.ask("matrix", run="growing", kind="activation", stat="mean").matrix
    assert (header["steps"], values[:, 0].tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])

    later = Site("b", "activation")  # comes with a tag of its own
    for step in range(5, 8):
        sink.write(
            make_frame(step, {site: [float(step)], later: [1.0]}, findings=[Finding(step, site, "x", "info", "x")])
        )
    sink.close()
    # Findings are the last of a step.
    (answer,) = server.wait_for(
        lambda: [f for f in server.ask("findings", run="growing").json["findings"] if f["count"] == 3]
    )
    assert (answer["onset"], answer["last"]) == (5, 7)
    header, values = server.ask("matrix", run="growing", kind="activation", stat="mean", after=4).matrix
    assert (header["steps"], values.tolist()) == ([5, 6, 7], [[5, 1], [6, 1], [7, 1]])
    header, values = server.ask("matrix", run="growing", kind="activation", stat="p50").matrix
    assert (header["steps"], values[:, 0].tolist()) == (list(range(8)), list(range(8)))


def test_a_run_that_starts_again_is_what_it_was_the_last_time(server: Server) -> None:
    site = Site("a", "activation")
    # One file, as one writer that is used on; another file would come after this one at some time or other.
    sink = TensorBoardSink(server.directory / "restarted", scalars=())
    for time_, (first, last, value) in enumerate([(0, 6, 1.0), (3, 8, 2.0)]):
        for step in range(first, last):
            frame = make_frame(step, {site: [value]})
            sink.write(Frame(step, 1e9 + 100 * time_ + step, 0, frame.sites, frame.values, frame.buckets))
    sink.close()
    server.wait_for(lambda: server.newest().get("restarted") == 7)
    header, values = server.ask("matrix", run="restarted", kind="activation", stat="mean").matrix
    assert header["steps"] == list(range(8))
    assert values[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 2, 2]


def test_many_browsers_at_a_time_get_the_same(server: Server) -> None:
    stats = ("mean", "norm", "p50", "p99", "max", "count")

    def ask(i: int) -> tuple[str, bytes]:
        stat = stats[i % len(stats)]
        return stat, server.ask("matrix", run="long", kind="activation", stat=stat).content

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(24)))
    assert len(set(answers)) == len(stats)


def test_a_run_that_was_removed_is_missing(server: Server) -> None:
    if not server.fast:
        pytest.skip("TensorBoard's Python loader goes on serving what it has read")
    assert server.ask("findings", run="many/0").status == 200
    shutil.rmtree(server.directory / "many/0")
    server.wait_for(lambda: "many/0" not in server.newest())
    server.wait_for(lambda: server.ask("findings", run="many/0").status != 200)
    reply = server.ask("findings", run="many/0")
    assert (reply.status, reply.content) == (404, b"run 'many/0' is no longer in the log directory")
