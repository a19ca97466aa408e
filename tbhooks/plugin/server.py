"""The tab's server: one route for each file of the page and each question it asks.

Every parameter is checked before anything is read; what is wrong is answered by a sentence. Files are the page's
own, listed once; data comes from TensorBoard's data provider alone.
"""

from __future__ import annotations

import mimetypes
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from tbhooks.data.stats import QUANTILES, STAT_NAMES
from tbhooks.plugin import responses
from tbhooks.plugin.index import KINDS, Kind, RunIndex
from tbhooks.plugin.matrix import row_matrix
from tbhooks.plugin.provider import UnavailableError
from tbhooks.plugin.query import Asked, RefusedError
from tbhooks.plugin.store import Store, StoredRun, TooLargeError
from tbhooks.sinks.tensorboard import PLUGIN

STATIC = Path(__file__).parent / "static"
ENTRY = "/index.js"
JSON, BINARY, TEXT = "application/json", "application/octet-stream", "text/plain"
# Some systems' tables know these by other names, and a browser runs no module that is called plain text.
CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": JSON}

Application = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A request: its parameters, and for whom TensorBoard is to read."""

    asked: Asked
    context: Any
    experiment: str


Answer = tuple[bytes, str]


class Plugin(base_plugin.TBPlugin):  # type: ignore[misc]  # TensorBoard has no types
    """The TBHOOKS tab."""

    plugin_name = PLUGIN

    def __init__(self, context: Any) -> None:
        self._store = Store(context.data_provider)
        # Who asks for a run that was here and is gone makes no mistake.
        self._known_runs: set[str] = set()

    def get_plugin_apps(self) -> dict[str, Application]:
        questions = {
            "/runs": self._runs,
            "/sites": self._sites,
            "/matrix": self._matrix,
            "/distribution": self._distribution,
            "/history": self._history,
            "/findings": self._findings,
        }
        files = {_route(path): _file_app(path) for path in sorted(STATIC.rglob("*")) if path.is_file()}
        return files | {route: _question_app(answer) for route, answer in questions.items()}

    def is_active(self) -> bool:
        """TensorBoard asks only when no run holds data of ours: then the tab stays out of the way."""
        return False

    def frontend_metadata(self) -> Any:
        return base_plugin.FrontendMetadata(es_module_path=ENTRY, tab_name="tbhooks")

    # --- Questions ---

    def _runs(self, question: Question) -> Answer:
        question.asked.only()
        runs = self._store.runs(question.context, question.experiment)
        self._known_runs.update(runs)
        entries = [responses.run_entry(run) for run in runs.values()]
        return responses.dumps({"runs": entries, "stats": list(STAT_NAMES), "now": time.time()}), JSON

    def _sites(self, question: Question) -> Answer:
        question.asked.only("run", "kind")
        run, kind = self._kind(question)
        sites = [{"path": site.path, "index": site.index, "name": site.name} for site in kind.sites]
        return responses.dumps({"run": run.name, "kind": kind.name, "sites": sites}), JSON

    def _matrix(self, question: Question) -> Answer:
        question.asked.only("run", "kind", "stat", "after")
        stat = question.asked.one_of("stat", STAT_NAMES)
        after = question.asked.whole("after") if "after" in question.asked else None
        run, kind = self._kind(question)
        if stat == "ratio" and "ratio" not in kind.stats:
            raise RefusedError(f"{stat!r} is known of updates only, and {kind.name!r} was asked for")
        stored = self._stored(question, run)
        rows = stored.rows(kind)
        matrix = stored.quantiles(kind, stat) if stat in QUANTILES else row_matrix(stat, rows)
        names = {"run": run.name, "kind": kind.name, "stat": stat}
        return responses.matrix_bytes(names, kind.sites, rows, matrix, after), BINARY

    def _distribution(self, question: Question) -> Answer:
        question.asked.only("run", "kind", "path", "index", "step")
        step = question.asked.whole("step")
        run, kind = self._kind(question)
        position, stored = _position(question.asked, kind), self._stored(question, run)
        answer = responses.distribution(kind, stored.rows(kind), stored.histograms(kind), position, step)
        if answer is None:
            name = kind.sites[position].name
            raise RefusedError(f"run {run.name!r} has no {kind.name} of {name!r} yet", missing=True)
        return responses.dumps(answer), JSON

    def _history(self, question: Question) -> Answer:
        question.asked.only("run", "kind", "path", "index")
        run, kind = self._kind(question)
        position, stored = _position(question.asked, kind), self._stored(question, run)
        return responses.dumps(responses.history(kind, stored.rows(kind), stored.histograms(kind), position)), JSON

    def _findings(self, question: Question) -> Answer:
        question.asked.only("run")
        told = self._stored(question, self._run(question)).findings()
        return responses.dumps({"findings": responses.findings(told)}), JSON

    # --- What a question is about ---

    def _stored(self, question: Question, run: RunIndex) -> StoredRun:
        return self._store.run(question.context, question.experiment, run)

    def _run(self, question: Question) -> RunIndex:
        name = question.asked.text("run")
        runs = self._store.runs(question.context, question.experiment, name)
        if name in runs:
            self._known_runs.add(name)
            return runs[name]
        if name in self._known_runs:
            raise RefusedError(f"run {name!r} is no longer in the log directory", missing=True)
        raise RefusedError.unknown("run", name, self._store.runs(question.context, question.experiment))

    def _kind(self, question: Question) -> tuple[RunIndex, Kind]:
        kind = question.asked.one_of("kind", KINDS)
        run = self._run(question)
        if kind not in run.kinds:
            raise RefusedError(f"run {run.name!r} holds no {kind!r}, but {_listed(run.kinds)}", missing=True)
        return run, run.kinds[kind]


def _position(asked: Asked, kind: Kind) -> int:
    path, index = asked.text("path"), asked.text("index") if "index" in asked else ""
    if (path, index) not in kind.position:
        indices = [site.index for site in kind.sites if site.path == path]
        if indices:
            raise RefusedError.unknown(f"index of {path!r}", index, indices)
        raise RefusedError.unknown(f"path of {kind.name}", path, [site.path for site in kind.sites])
    return kind.position[path, index]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "findings alone"


def _question_app(answer: Callable[[Question], Answer]) -> Application:
    def respond(request: wrappers.Request) -> Any:
        if request.method not in ("GET", "HEAD"):
            allow = [("Allow", "GET, HEAD")]
            return http_util.Respond(request, f"{request.method} is not allowed, GET is", TEXT, code=405, headers=allow)
        context, experiment = plugin_util.context(request.environ), plugin_util.experiment_id(request.environ)
        try:
            content, content_type = answer(Question(Asked(request.args), context, experiment))
        except RefusedError as refused:
            return _sentence(request, refused, refused.status)
        except TooLargeError as problem:
            return _sentence(request, problem, 400)
        except UnavailableError as problem:
            return _sentence(request, problem, 503)
        return http_util.Respond(request, content, content_type)

    return wrappers.Request.application(respond)


def _sentence(request: wrappers.Request, problem: Exception, status: int) -> Any:
    return http_util.Respond(request, str(problem).encode(errors="replace"), TEXT, code=status)


def _route(path: Path) -> str:
    return f"/{path.relative_to(STATIC).as_posix()}"


def _file_app(path: Path) -> Application:
    content_type = CONTENT_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or BINARY

    def respond(request: wrappers.Request) -> Any:
        return http_util.Respond(request, path.read_bytes(), content_type)

    return wrappers.Request.application(respond)
