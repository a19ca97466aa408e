"""Graphs and the summary as a real TensorBoard serves them, with either of its loaders."""

from __future__ import annotations

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import text_format
from tensorboard.compat.proto import event_pb2, graph_pb2
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks.data.artifacts import Graph, Node
from tbhooks.sinks.tensorboard import graphs
from tests.support.graph_models import EVALUATED, TRAINED, Differs, Residual, x
from tests.support.processes import wait_until
from tests.support.tensorboard_server import Server

# In one process: each would start servers of its own.
pytestmark = pytest.mark.xdist_group("tensorboard_server")

Ask = Callable[..., str]


class OddlyNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("<b>|*_слой", nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        return {"out": self.get_submodule("<b>|*_слой")(x)}


def train(model: nn.Module, writer: Any, first_step: int = 0) -> tbhooks.Watch:
    """Two steps and an evaluation, drawn and described."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    w = tbhooks.watch(model, writer, every=1).graph().evaluation()
    w.summary()
    for step in range(first_step, first_step + 2):
        output = model(x())
        (output["out"] if isinstance(output, dict) else output).sum().backward()
        optimizer.step()
        w.step(step)
    model.eval()
    with torch.no_grad():
        model(x())
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    return w


def theirs() -> graph_pb2.GraphDef:
    return graphs.graph_def(Graph("theirs", (Node("mine", "Mine"), Node("too", "Mine", ("mine",)))))


def add_graph(writer: SummaryWriter, flush: bool = True) -> None:
    """A graph as others write it."""
    content = theirs()
    del content.node[0].attr[graphs.MARK]
    writer._get_file_writer().add_event(event_pb2.Event(graph_def=content.SerializeToString()))
    if flush:
        writer.flush()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    train(Differs(), str(directory / "plain"))
    train(OddlyNamed(), str(directory / "odd"))
    with SummaryWriter(str(directory / "users")) as writer:
        add_graph(writer)
        train(Residual(), writer)
    train(Residual(), str(directory / "again"))
    time.sleep(1.1)  # files are read in the order of the seconds in their names
    train(Differs(), str(directory / "again"), first_step=2)
    model = Differs()
    w = tbhooks.watch(model, str(directory / "apart"), every=1).graph().evaluation(str(directory / "apart_eval"))
    model(x()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    model.eval()
    model(x())
    w.close()
    return directory


@pytest.fixture(scope="module", params=["true", "false"], ids=["load_fast", "load_slow"])
def ask(request: pytest.FixtureRequest, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with Server(runs, tmp_path_factory.mktemp("server") / "log", f"--load_fast={request.param}") as server:

        def fetch(route: str, **query: str) -> str:
            url = f"{server.address}/data/plugin/{route}?{urllib.parse.urlencode(query)}"
            with server.opener.open(url, timeout=20) as answer:
                return str(answer.read().decode())

        def is_loaded() -> bool:
            known = json.loads(fetch("graphs/info"))
            return len(known) == 6 and all(run["tags"] for name, run in known.items() if name != "apart")

        server.wait_for(is_loaded)
        yield fetch


def graph(ask: Ask, **query: str) -> graph_pb2.GraphDef:
    return text_format.Parse(ask("graphs/graph", **query), graph_pb2.GraphDef())


def arrows(served: graph_pb2.GraphDef) -> dict[str, list[str]]:
    return {node.name: sorted(node.input) for node in served.node}


def test_training_is_the_runs_own_graph_and_evaluation_has_a_tag(ask: Ask) -> None:
    known = json.loads(ask("graphs/info"))["plain"]
    assert known["run_graph"]
    assert list(known["tags"]) == ["tbhooks/evaluation"]
    assert known["tags"]["tbhooks/evaluation"]["op_graph"]
    assert arrows(graph(ask, run="plain")) == TRAINED
    assert arrows(graph(ask, run="plain", tag="tbhooks/evaluation")) == EVALUATED


def test_boxes_say_what_they_are(ask: Ask) -> None:
    (layer,) = [node for node in graph(ask, run="plain").node if node.name == "layer"]
    assert layer.op == "Linear"
    (shape,) = layer.attr["_output_shapes"].list.shape
    assert [dim.size for dim in shape.dim] == [3, 4]
    assert layer.attr["parameters"].s == b"20"
    assert layer.attr["dtype"].s == b"float32"


def test_a_graph_of_the_users_own_stays_what_the_run_shows(ask: Ask) -> None:
    assert arrows(graph(ask, run="users")) == {"mine": [], "too": ["mine"]}
    tags = json.loads(ask("graphs/info"))["users"]["tags"]
    assert sorted(tags) == ["tbhooks/evaluation", "tbhooks/training"]
    assert arrows(graph(ask, run="users", tag="tbhooks/training"))["add"] == ["input/x", "two"]


def test_a_run_that_goes_on_shows_its_newest_graph(ask: Ask) -> None:
    assert wait_until(lambda: arrows(graph(ask, run="again")) == TRAINED, 20.0)


def test_evaluations_with_a_writer_of_their_own_have_their_graph_there(ask: Ask) -> None:
    assert arrows(graph(ask, run="apart")) == TRAINED
    assert arrows(graph(ask, run="apart_eval", tag="tbhooks/evaluation")) == EVALUATED
    assert not json.loads(ask("graphs/info"))["apart"]["tags"]


def test_names_of_any_kind_are_served(ask: Ask) -> None:
    served = arrows(graph(ask, run="odd"))
    assert served == {"input/x": [], "<b>|*_слой": ["input/x"], "output": ["<b>|*_слой"]}


def test_the_summary_is_in_the_text_tab_once(ask: Ask) -> None:
    assert json.loads(ask("text/tags"))["plain"] == ["tbhooks/summary/text_summary"]
    (reported,) = json.loads(ask("text/text", run="plain", tag="tbhooks/summary/text_summary"))
    cells = re.findall(r"<td[^>]*>(.*?)</td>", reported["text"])
    assert cells[:8] == ["layer", "Linear", "3x4", "float32", "20", "yes", "50.0%", "16 B"]
    assert "40 parameters (160 B): 40 trainable, 0 not" in reported["text"]


def test_names_in_the_summary_are_no_markup(ask: Ask) -> None:
    (reported,) = json.loads(ask("text/text", run="odd", tag="tbhooks/summary/text_summary"))
    assert re.findall(r"<td[^>]*>(.*?)</td>", reported["text"])[0] == "&lt;b&gt;|*_слой"


# --- Without a server -----------------------------------------------------------------------------


def test_a_large_file_is_not_read_for_its_graphs(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (0, 1, 127, 128, 300, 1 << 40):
            writer.add_scalar("a", 1.0, step)
        writer.flush()
        assert not graphs.has_graph_of_others(str(tmp_path))
        add_graph(writer)
        assert graphs.has_graph_of_others(str(tmp_path))


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_file_that_was_cut_short_harms_nothing(tmp_path: Path, cut: int) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        add_graph(writer)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    graphs.has_graph_of_others(str(tmp_path))
    assert not graphs.has_graph_of_others("s3://nowhere/run")


def test_a_graph_of_the_users_own_that_is_not_on_disk_yet_stays_what_the_run_shows(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path), max_queue=10_000, flush_secs=1000) as writer:
        for step in range(3000):
            writer.add_scalar("a", 1.0, step)
        add_graph(writer, flush=False)
        train(Residual(), writer)
    (path,) = tmp_path.iterdir()
    assert len(list(graphs._graphs(path))) == 1


def test_a_graph_that_is_asked_for_twice_is_written_once(tmp_path: Path) -> None:
    model = Residual()
    w = tbhooks.watch(model, str(tmp_path), every=1).graph().graph()
    model(x()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    w.close()
    (path,) = tmp_path.iterdir()
    assert len(list(graphs._graphs(path))) == 1
