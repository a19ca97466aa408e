"""The tab's server: one route for each static file and one for each kind of data.

All parameters are checked before anything is read; errors are answered by a sentence. Data comes from TensorBoard's
data provider only.
"""

from __future__ import annotations

import contextlib
import gzip
import mimetypes
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from tbhooks.data.roles import GAIN
from tbhooks.data.stats import QUANTILES, STAT_NAMES
from tbhooks.plugin import bundle, overview, responses
from tbhooks.plugin.index import KINDS, Kind, RunIndex, is_kind
from tbhooks.plugin.matrix import is_derived, row_matrix
from tbhooks.plugin.provider import UnavailableError
from tbhooks.plugin.query import Query, QueryError
from tbhooks.plugin.store import Store, StoredRun, TooLargeError
from tbhooks.sinks.tensorboard import PLUGIN

STATIC = Path(__file__).parent / "static"
ENTRY, STYLE = "/tab.js", "/tab.css"
STYLES = ("core/style.css", "overview/overview.css", "detail/panel.css")
# In an installed package, and in a checkout.
RULES = (STATIC.parent / "rules.md", STATIC.parents[2] / "docs" / "rules.md")
JSON, BINARY, TEXT = "application/json", "application/octet-stream", "text/plain"
# Some systems map these to other types, and browsers do not run a module that is served as plain text.
CONTENT_TYPES = {
    ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": JSON,
}  # fmt: skip

Application = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class DataRequest:
    """A request: its parameters, and the context in which TensorBoard reads for it."""

    query: Query
    context: Any
    experiment: str


Response = tuple[bytes, str]
"""Body and content type."""


class Plugin(base_plugin.TBPlugin):  # type: ignore[misc]  # TensorBoard has no types
    """The TBHOOKS tab."""

    plugin_name = PLUGIN

    def __init__(self, context: Any) -> None:
        self._store = Store(context.data_provider)
        # A request for a run that was deleted is answered by 404, not as an unknown name.
        self._known_runs: set[str] = set()

    def get_plugin_apps(self) -> dict[str, Application]:
        routes = {
            "/runs": self._runs,
            "/sites": self._sites,
            "/matrix": self._matrix,
            "/distribution": self._distribution,
            "/history": self._history,
            "/findings": self._findings,
            "/samples": self._samples,
            "/scalars": self._scalars,
            "/overview": self._overview,
        }
        files = {_route(path): _file_app(path) for path in sorted(STATIC.rglob("*")) if path.is_file()}
        made = {ENTRY: _made_app(_script, ".js"), STYLE: _made_app(_style, ".css")}
        return files | made | {"/rules.md": _docs_app} | {route: _data_app(answer) for route, answer in routes.items()}

    def is_active(self) -> bool:
        """Called by TensorBoard only if no run has our data: then the tab is inactive."""
        return False

    def frontend_metadata(self) -> Any:
        return base_plugin.FrontendMetadata(es_module_path=ENTRY, tab_name="tbhooks")

    # --- Data routes ---

    def _runs(self, request: DataRequest) -> Response:
        request.query.only()
        runs = self._store.runs(request.context, request.experiment)
        self._known_runs.update(runs)
        entries = [responses.run_entry(run, self._state(request, run)) for run in runs.values()]
        return responses.dumps({"runs": entries, "stats": list(STAT_NAMES), "now": time.time()}), JSON

    def _state(self, request: DataRequest, run: RunIndex) -> str:
        try:
            stored = self._stored(request, run)
            return overview.run_state(run, stored.findings(), stored.outcome())
        except UnavailableError:  # the list itself was there; the state can wait for the next one
            return overview.run_state(run, ())

    def _sites(self, request: DataRequest) -> Response:
        request.query.only("run", "kind")
        run, kind = self._kind(request)
        sites = overview.site_entries(run, kind)
        return responses.dumps({"run": run.name, "kind": kind.name, "sites": sites}), JSON

    def _matrix(self, request: DataRequest) -> Response:
        request.query.only("run", "kind", "stat", "after", "order")
        order = request.query.one_of("order", ("step", "site")) if "order" in request.query else "step"
        after = request.query.integer("after") if "after" in request.query else None
        run, kind = self._kind(request)
        metrics = () if kind.metrics is None else kind.metrics.numbers
        stat = request.query.one_of("stat", (*STAT_NAMES, GAIN, *metrics))
        if stat in ("ratio", GAIN) and stat not in kind.stats:
            having = "updates" if stat == "ratio" else "gradients of modules with the same role"
            raise QueryError(f"only {having} have {stat!r}, not {kind.name!r}")
        stored = self._stored(request, run)
        rows = stored.metric(kind, stat) if stat in metrics else stored.rows(kind)
        if stat in QUANTILES:
            matrix = stored.quantiles(kind, stat)
        elif stat == GAIN or is_derived(stat):
            matrix = stored.derived(kind, stat)
        else:
            matrix = row_matrix("mean" if stat in metrics else stat, rows)  # a metric is the row of one number
        names = {"run": run.name, "kind": kind.name, "stat": stat}
        by_site = order == "site"
        return responses.matrix_bytes(names, kind.sites, rows, matrix, after, by_site=by_site), BINARY

    def _distribution(self, request: DataRequest) -> Response:
        request.query.only("run", "kind", "path", "index", "step")
        step = request.query.integer("step")
        run, kind = self._kind(request)
        position, stored = _position(request.query, kind), self._stored(request, run)
        metrics = stored.metrics(kind, position)
        answer = responses.distribution(kind, stored.rows(kind), stored.histograms(kind), metrics, position, step)
        if answer is None:
            name = kind.sites[position].name
            raise QueryError(f"run {run.name!r} has no {kind.name} of {name!r} yet", missing=True)
        return responses.dumps(answer), JSON

    def _history(self, request: DataRequest) -> Response:
        request.query.only("run", "kind", "path", "index", "form")
        form = request.query.one_of("form", ("json", "binary")) if "form" in request.query else "json"
        run, kind = self._kind(request)
        position, stored = _position(request.query, kind), self._stored(request, run)
        metrics = stored.metrics(kind, position)
        answer = responses.history(kind, stored.rows(kind), stored.histograms(kind), metrics, position)
        return (answer.to_bytes(), BINARY) if form == "binary" else (responses.dumps(answer.to_dict()), JSON)

    def _findings(self, request: DataRequest) -> Response:
        request.query.only("run")
        stored = self._stored(request, self._run(request)).findings()
        return responses.dumps({"findings": overview.finding_entries(stored)}), JSON

    def _samples(self, request: DataRequest) -> Response:
        request.query.only("run", "step")
        step = request.query.integer("step")
        found = self._stored(request, self._run(request)).samples(step)
        return responses.dumps({"step": None} if found is None else {"step": found[0], **found[1].to_dict()}), JSON

    def _scalars(self, request: DataRequest) -> Response:
        request.query.only("run")
        stored = self._stored(request, self._run(request))
        return responses.dumps({"scalars": overview.scalar_entries(stored.scalars())}), JSON

    def _overview(self, request: DataRequest) -> Response:
        request.query.only("run")
        run = self._run(request)
        stored = self._stored(request, run)
        smallest = min(run.kinds.values(), key=lambda kind: len(kind.sites), default=None)
        steps = [] if smallest is None else stored.rows(smallest).steps.tolist()
        return responses.dumps(overview.run_overview(run, stored.findings(), stored.scalars(), steps)), JSON

    # --- What a request refers to ---

    def _stored(self, request: DataRequest, run: RunIndex) -> StoredRun:
        return self._store.run(request.context, request.experiment, run)

    def _run(self, request: DataRequest) -> RunIndex:
        name = request.query.text("run")
        runs = self._store.runs(request.context, request.experiment, name)
        if name in runs:
            self._known_runs.add(name)
            return runs[name]
        if name in self._known_runs:
            raise QueryError(f"run {name!r} is no longer in the log directory", missing=True)
        raise QueryError.unknown("run", name, self._store.runs(request.context, request.experiment))

    def _kind(self, request: DataRequest) -> tuple[RunIndex, Kind]:
        kind = request.query.text("kind")
        if not is_kind(kind):
            raise QueryError.unknown("kind", kind, KINDS)
        run = self._run(request)
        if kind not in run.kinds:
            raise QueryError(f"run {run.name!r} has no {kind!r}, but {_listed(run.kinds)}", missing=True)
        return run, run.kinds[kind]


def _position(query: Query, kind: Kind) -> int:
    path, index = query.text("path"), query.text("index") if "index" in query else ""
    if (path, index) not in kind.position:
        indices = [site.index for site in kind.sites if site.path == path]
        if indices:
            raise QueryError.unknown(f"index of {path!r}", index, indices)
        raise QueryError.unknown(f"path of {kind.name}", path, [site.path for site in kind.sites])
    return kind.position[path, index]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "findings only"


def _send_at_once(request: wrappers.Request) -> None:
    """Has TensorBoard's server send the body with the headers; else it waits 40 ms until those are acknowledged."""
    connection = request.environ.get("werkzeug.socket")
    if isinstance(connection, socket.socket):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _data_app(answer: Callable[[DataRequest], Response]) -> Application:
    def respond(request: wrappers.Request) -> Any:
        _send_at_once(request)
        if request.method not in ("GET", "HEAD"):
            allow = [("Allow", "GET, HEAD")]
            return http_util.Respond(request, f"{request.method} is not allowed, GET is", TEXT, code=405, headers=allow)
        context, experiment = plugin_util.context(request.environ), plugin_util.experiment_id(request.environ)
        try:
            content, content_type = answer(DataRequest(Query(request.args), context, experiment))
        except QueryError as refused:
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


@wrappers.Request.application
def _docs_app(request: wrappers.Request) -> Any:
    """The documentation of the rules as Markdown, which the page shows that findings link to."""
    for path in RULES:
        if path.is_file():
            return http_util.Respond(request, path.read_bytes(), TEXT)
    return http_util.Respond(request, "docs/rules.md is not part of this installation", TEXT, code=404)


def _file_app(path: Path) -> Application:
    content_type = CONTENT_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or BINARY

    def respond(request: wrappers.Request) -> Any:
        _send_at_once(request)
        return http_util.Respond(request, path.read_bytes(), content_type)

    return wrappers.Request.application(respond)


def _script(root: Path) -> str:
    return bundle.script(root, "index.js")


def _style(root: Path) -> str:
    return bundle.styles(root, STYLES)


@lru_cache(maxsize=4)
def _compressed(make: Callable[[Path], str], root: Path, _edited: tuple[int, ...]) -> bytes:
    return gzip.compress(make(root).encode(), mtime=0)


def _made_app(make: Callable[[Path], str], suffix: str) -> Application:
    """Serves what is made of several files: when TensorBoard starts, and again when one of them was edited."""
    root, files = STATIC, [path for path in STATIC.rglob(f"*{suffix}") if path.is_file()]

    def current() -> bytes:
        return _compressed(make, root, tuple(path.stat().st_mtime_ns for path in files))

    def respond(request: wrappers.Request) -> Any:
        _send_at_once(request)
        return http_util.Respond(request, current(), CONTENT_TYPES[suffix], content_encoding="gzip")

    current()
    return wrappers.Request.application(respond)
