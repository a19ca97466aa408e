"""`Watch.live()`: a notebook cell that follows a training run.

Frames arrive in the worker's thread. A view is drawn there at most twice a second and for at most a hundredth of the
time, once more at the end of every cell and once at the end of the run, so that a saved notebook keeps the last state.
Nothing here raises into training, prints, or waits while it draws.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tbhooks.data.errors import ArgumentError, check_names
from tbhooks.data.frame import EVALUATION, RECORDED_KINDS, Finding, Frame
from tbhooks.data.history import History
from tbhooks.data.self_report import Report, Stats
from tbhooks.data.stats import STAT_NAMES
from tbhooks.views.live import panel
from tbhooks.views.live.timeline import Timeline
from tbhooks.views.notebook import mimebundle

SHORTEST_PAUSE_S = 0.5
LARGEST_SHARE = 0.01
# Half of the share is for drawing: reading frames counts, too, and so does a drawing whose pause has just begun.
DRAWING_SHARE = LARGEST_SHARE / 2
CELL_TIMEOUT_S = 1.0
"""How long the end of a cell waits for the last frames."""
STATIC_VIEW_EVERY_S = 30.0
"""How often the static picture behind an interactive view is updated while a cell runs."""
CELL_ENDS = "post_run_cell"


@dataclass(frozen=True, eq=False)
class Source:
    """What a live view reads of a watch. Only `settle` waits."""

    history: History
    report: Report
    kinds: tuple[str, ...]
    findings: Callable[[], Sequence[Finding]]
    """The findings so far, oldest first."""
    stats: Callable[[], Stats]
    follow: Callable[[Live], None]
    """Has `frame` and `closed` of the view called from now on; does nothing if the watch is closed."""
    settle: Callable[[float], None]
    """Waits at most so many seconds until the steps that have ended are in the history."""


class Screen(Protocol):
    """Something that shows a view: a cell's output, or a widget."""

    def open(self, live: Live) -> None:
        """Shows the view in the running cell."""

    def update(self, live: Live, *, final: bool) -> None:
        """Shows the present state; `final` means that no update may follow for long."""


class Pace:
    """When the next drawing is due: after half a second, and after 200 times as long as the last one took."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._due = clock()

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._due

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Measures a drawing."""
        started = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            self._due = ended + max(SHORTEST_PAUSE_S, (ended - started) / DRAWING_SHARE)


# The views of each watch by kind and statistic: a cell that is run again replaces its view.
_views: weakref.WeakKeyDictionary[object, dict[tuple[str, str], Live]] = weakref.WeakKeyDictionary()


class Live:
    """A view that follows a watch; made by `Watch.live()`.

    In a notebook it shows itself at once, and again as the value of a later cell. Outside of one, `print(view)` writes
    it as text.
    """

    def __init__(self, source: Source, kind: str, stat: str) -> None:
        self.updates = 0
        """How often it was drawn."""
        self.seconds = 0.0
        """Time spent on reading frames and on drawing."""
        self.timeline = Timeline(kind, stat)
        self._source = source
        # Frames arrive in the worker's thread, choices in the kernel's, the end of a cell in the main thread.
        self._lock = threading.RLock()
        self._pace = Pace()
        self._screens: list[Screen] = []
        self._newest: object = None
        self._late: list[Frame] = []
        self._has_new_frames = False
        self._has_ended = False
        self._shell: Any = None
        self._shown_in: object = None

    @classmethod
    def start(
        cls, watch: object, kind: str = "activation", stat: str = "std", interactive: bool | None = None,
        **source: Any,
    ) -> Live:  # fmt: skip
        """Follows a watch from now on, beginning with the frames in its history. See `Watch.live`.

        `source` are the fields of `Source`. Raises ArgumentError for what the watch cannot show.
        """
        live = cls(Source(**source), kind, stat)
        live._check(kind, stat)
        shell = _kernel_shell()
        has_widget = _wants_widget(interactive, shell)
        live._source.follow(live)
        views = _views.setdefault(watch, {})
        if (kind, stat) in views:
            views[kind, stat].stop()
        views[kind, stat] = live
        if shell is not None:
            live._open(shell, has_widget, required=bool(interactive))
        return live

    # --- Called by the worker's thread ----------------------------------------------------------------

    def frame(self, frame: Frame) -> None:
        """Draws if a drawing is due; otherwise the frame waits in the history."""
        with self._lock, self._reporting_errors():
            if not self._has_ended:
                self._has_new_frames = True
                if not frame.sites:
                    self._late.append(frame)
                if self._pace.is_due:
                    self._draw(final=False)

    def closed(self) -> None:
        """Draws the last state: no frame follows."""
        self.stop()

    # --- Called by users ------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stops following; the last state stays on the page."""
        with self._lock, self._reporting_errors():
            if not self._has_ended:
                self._has_ended = True
                if self._shell is not None and self._on_cell_end in self._shell.events.callbacks[CELL_ENDS]:
                    self._shell.events.unregister(CELL_ENDS, self._on_cell_end)
                self._draw(final=True)

    def __repr__(self) -> str:
        with self._lock:
            self._catch_up()
            return panel.text(self.timeline, self.status())

    def __str__(self) -> str:
        """As `print` writes it: only the headline if the running cell shows the view already."""
        with self._lock:
            self._catch_up()
            return panel.headline(self.timeline, self.status()) if self._is_shown_here() else repr(self)

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        with self._lock:
            text = repr(self)
            return mimebundle(text, panel.render_html(self.timeline, self.status()), include, exclude)

    def _ipython_display_(self) -> None:
        """Shows the view in the running cell, unless it was made there and is on the page already."""
        if self._shell is not None and not self._is_shown_here():
            with self._lock, self._reporting_errors():
                self._show_here()

    def _is_shown_here(self) -> bool:
        return self._shell is not None and self._shown_in == self._shell.execution_count

    # --- Called by screens ----------------------------------------------------------------------------

    def status(self) -> panel.Status:
        """The findings, and what went wrong with the watch itself."""
        stats = self._source.stats()
        notes = (
            f"{stats.dropped} logged steps were dropped: see w.stats.messages" if stats.dropped else "",
            f"{stats.errors} errors inside tbhooks were caught: see w.stats.messages" if stats.errors else "",
        )
        state = "ended" if self._has_ended else "following"
        return panel.Status(self._source.findings(), tuple(filter(None, notes)), state)

    @property
    def history(self) -> History:
        """The frames in the watch's history; reading it does not wait."""
        return self._source.history

    def choose(self, kind: str, stat: str) -> None:
        """Shows another statistic of all frames in the history. Raises ArgumentError if the watch does not have it."""
        self._check(kind, stat)
        with self._lock, self._reporting_errors():
            self.timeline, self._newest = Timeline(kind, stat), None
            self._draw(final=False)

    def _check(self, kind: str, stat: str) -> None:
        check_names("kind", (kind,), (*RECORDED_KINDS, *(EVALUATION + name for name in RECORDED_KINDS)))
        check_names("stat", (stat,), STAT_NAMES)
        plain, kinds = kind.removeprefix(EVALUATION), self._source.kinds
        if plain not in kinds:
            raise ArgumentError(f"this watch does not read {plain!r}: it was made with kinds={kinds}")
        if stat == "ratio" and plain != "update":
            raise ArgumentError(f"only the kind 'update' has a ratio, not {kind!r}")

    # --- Drawing --------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Adds the new frames of the history to the timeline, then the scalars that came after their frame."""
        new: list[Frame] = []
        for frame in reversed(self.history[:]):
            if _key(frame) == self._newest:
                break
            new.append(frame)
        late, self._late = self._late, []
        for frame in [*reversed(new), *late]:
            self.timeline.add(frame)
        self._newest = _key(new[0]) if new else self._newest

    def _open(self, shell: Any, has_widget: bool, *, required: bool) -> None:
        self._shell = shell
        css_class = f"tbhooks-live-{uuid.uuid4().hex[:12]}" if has_widget else ""
        self._screens = [CellOutput(css_class, STATIC_VIEW_EVERY_S if has_widget else 0.0)]
        if has_widget:
            from tbhooks.views.live import widget  # noqa: PLC0415  anywidget is an extra

            try:
                self._screens.append(widget.WidgetScreen(self, css_class))
            except Exception as problem:  # if widgets are broken, the static view remains
                if required:
                    raise
                self._source.report.error("live view", problem)
        with self._lock, self._reporting_errors():
            self._show_here()
        if not self._has_ended:
            shell.events.register(CELL_ENDS, self._on_cell_end)

    def _show_here(self) -> None:
        self._shown_in = self._shell.execution_count
        with self._pace.drawing():
            self._catch_up()
            for screen in self._screens:
                screen.open(self)

    def _draw(self, *, final: bool) -> None:
        if self._screens:
            with self._pace.drawing():
                self._catch_up()
                for screen in self._screens:
                    screen.update(self, final=final)
            self.updates += 1
        self._has_new_frames = self._has_new_frames and not final

    def _on_cell_end(self, _result: object = None) -> None:
        """Draws the last step, so that a notebook saved after the cell has it."""
        with self._reporting_errors(counts_time=False):
            self._source.settle(CELL_TIMEOUT_S)
        with self._lock, self._reporting_errors():
            if self._has_new_frames and not self._has_ended:
                self._draw(final=True)

    @contextmanager
    def _reporting_errors(self, *, counts_time: bool = True) -> Iterator[None]:
        """Errors inside go to the watch's report instead of the caller; the time spent is added up."""
        started = time.perf_counter()
        try:
            yield
        except Exception as problem:
            self._source.report.error("live view", problem)
        finally:
            self.seconds += counts_time * (time.perf_counter() - started)


class CellOutput:
    """Text and HTML in the output of a cell, updated in place through its display id from any thread."""

    def __init__(self, css_class: str = "", every_s: float = 0.0) -> None:
        self._css_class, self._every_s = css_class, every_s
        self._id = uuid.uuid4().hex
        self._sent_at = 0.0

    def open(self, live: Live) -> None:
        self._send(live, panel.text(live.timeline, live.status()), update=False)

    def update(self, live: Live, *, final: bool) -> None:
        if final or time.monotonic() - self._sent_at >= self._every_s:
            text = panel.text if final else panel.headline
            self._send(live, text(live.timeline, live.status()), update=True)

    def _send(self, live: Live, text: str, *, update: bool) -> None:
        self._sent_at = time.monotonic()
        html = panel.render_html(live.timeline, live.status(), self._css_class)
        publish({"text/plain": text, "text/html": html}, display_id=self._id, update=update)


def publish(bundle: Mapping[str, Any], **options: Any) -> None:
    """Sends a MIME bundle to the notebook from any thread: to the running cell or, as an update, to its display id."""
    from IPython.display import display  # noqa: PLC0415  only a notebook has it

    display(dict(bundle), raw=True, **options)  # type: ignore[no-untyped-call]


def _key(frame: Frame) -> tuple[int, float, bool]:
    """Identifies a frame: the history replaces the object when it gets findings or late scalars."""
    return frame.step, frame.time, frame.is_evaluation


def _wants_widget(interactive: bool | None, shell: Any) -> bool:
    if interactive not in (None, True, False):
        raise ArgumentError(f"interactive must be True, False or None, got {interactive!r}")
    is_installed = importlib.util.find_spec("anywidget") is not None
    if interactive and not is_installed:
        raise ArgumentError('interactive=True needs anywidget: pip install "tbhooks[jupyter]"')
    if interactive and shell is None:
        raise ArgumentError("interactive=True needs a notebook: elsewhere, print the view")
    return shell is not None and is_installed and interactive is not False


def _kernel_shell() -> Any:
    """IPython's shell if a notebook is connected to it; None in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell
