"""`Watch.live()`: a cell that follows a training run.

Frames come from the pump's thread. A view is drawn there at most twice a second and for at most a hundredth of the
time, once more at the end of every cell and once at the end of the run, so that a saved notebook keeps the last state.
Nothing here raises into training, prints, or waits for anybody while it draws.
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
from tbhooks.data.frame import ALL_KINDS, EVALUATION, Finding, Frame
from tbhooks.data.history import History
from tbhooks.data.self_report import Report, Stats
from tbhooks.data.stats import STAT_NAMES
from tbhooks.views.live import panel
from tbhooks.views.live.timeline import Followed
from tbhooks.views.notebook import mimebundle

SHORTEST_PAUSE_S = 0.5
LARGEST_SHARE = 0.01
# Half of it for drawing: what comes between drawings counts too, and so does one whose pause has only begun.
DRAWING_SHARE = LARGEST_SHARE / 2
PATIENCE_S = 1.0
"""How long the end of a cell may wait for the last frames."""
SAVED_EVERY_S = 30.0
"""How often the picture behind an interactive view is renewed while a cell runs."""
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
        """Shows it in the cell that runs."""

    def renew(self, live: Live, *, whole: bool) -> None:
        """Shows the present state wherever it is shown; the whole of it when nothing may follow for long."""


class Pace:
    """When the next drawing is due: after half a second, and after 200 times as long as the last one took."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._due = clock()

    @property
    def due(self) -> bool:
        return self._clock() >= self._due

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around a drawing."""
        started = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            self._due = ended + max(SHORTEST_PAUSE_S, (ended - started) / DRAWING_SHARE)


_views: weakref.WeakKeyDictionary[object, dict[tuple[str, str], Live]] = weakref.WeakKeyDictionary()


class Live:
    """A view that follows a watch; made by `Watch.live()`.

    In a notebook it shows itself at once, and again where it is the value of a later cell. Elsewhere it shows nothing
    by itself: `print(view)` writes it as text.
    """

    def __init__(self, source: Source, kind: str, stat: str) -> None:
        self.updates = 0
        """How often it was drawn."""
        self.seconds = 0.0
        """Time spent on drawing, and on taking in what is drawn."""
        self.followed = Followed(kind, stat)
        self._source = source
        # Frames come from the pump's thread, choices from the kernel's, the end of a cell from the main thread.
        self._lock = threading.RLock()
        self._pace = Pace()
        self._screens: list[Screen] = []
        self._newest: object = None
        self._late: list[Frame] = []
        self._fresh = False
        self._ended = False
        self._shell: Any = None
        self._shown_in: object = None

    @classmethod
    def start(
        cls, watch: object, kind: str = "activation", stat: str = "std", interactive: bool | None = None,
        **source: Any,
    ) -> Live:  # fmt: skip
        """Follows the watch from now on, and shows what it remembers of the time before. See `Watch.live`."""
        live = cls(Source(**source), kind, stat)
        _check(live._source, kind, stat)
        shell = _kernel_shell()
        with_widget = _wants_widget(interactive, shell)
        live._source.follow(live)
        before = _views.setdefault(watch, {})
        if (kind, stat) in before:  # the cell was run again: the output of the old one is gone
            before[kind, stat].stop()
        before[kind, stat] = live
        if shell is not None:
            live._open(shell, with_widget, required=bool(interactive))
        return live

    # --- What the pump's thread calls -----------------------------------------------------------------

    def frame(self, frame: Frame) -> None:
        """Draws, if that is due; until then a frame waits in the history."""
        with self._lock, self._guarded():
            if not self._ended:
                self._fresh = True
                if not frame.sites:
                    self._late.append(frame)
                if self._pace.due:
                    self._draw(whole=False)

    def closed(self) -> None:
        """Draws the last state: no frame follows."""
        self.stop()

    # --- What users call ------------------------------------------------------------------------------

    def stop(self) -> None:
        """Follows no more; what is shown stays, and tells so."""
        with self._lock, self._guarded():
            if not self._ended:
                self._ended = True
                self._forget_cells()
                self._draw(whole=True)

    def __repr__(self) -> str:
        with self._lock:
            self._catch_up()
            return panel.text(self.followed, self.told())

    def __str__(self) -> str:
        """As `print` writes it: what the cell shows already is not written below it once more."""
        with self._lock:
            self._catch_up()
            return panel.headline(self.followed, self.told()) if self._is_shown_here() else repr(self)

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        with self._lock:
            text = repr(self)
            return mimebundle(text, panel.render_html(self.followed, self.told()), include, exclude)

    def _ipython_display_(self) -> None:
        """As the value of the cell that made it, it is on the page already; a later cell shows it there, too."""
        if self._shell is not None and not self._is_shown_here():
            with self._lock, self._guarded():
                self._show_here()

    def _is_shown_here(self) -> bool:
        """Whether the cell that runs has shown it."""
        return self._shell is not None and self._shown_in == self._shell.execution_count

    # --- What screens call ----------------------------------------------------------------------------

    def told(self) -> panel.Told:
        """What is to be said besides the numbers."""
        source = self._source
        return panel.Told(
            list(source.findings()), tuple(_troubles(source.stats())), "ended" if self._ended else "following"
        )

    @property
    def history(self) -> History:
        """The frames the watch remembers; reading it does not wait."""
        return self._source.history

    def choose(self, kind: str, stat: str) -> None:
        """Shows another statistic, of all frames the watch remembers. An ArgumentError if there is no such one."""
        _check(self._source, kind, stat)
        with self._lock, self._guarded():
            self.followed, self._newest = Followed(kind, stat), None
            self._draw(whole=False)

    # --- Drawing --------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Takes in the frames that are new, and then the scalars that came after their frame."""
        new: list[Frame] = []
        for frame in reversed(self.history[:]):
            if _key(frame) == self._newest:
                break
            new.append(frame)
        late, self._late = self._late, []
        for frame in [*reversed(new), *late]:
            self.followed.take(frame)
        self._newest = _key(new[0]) if new else self._newest

    def _open(self, shell: Any, with_widget: bool, *, required: bool) -> None:
        self._shell = shell
        mark = f"tbhooks-live-{uuid.uuid4().hex[:12]}" if with_widget else ""
        self._screens = [CellOutput(mark, SAVED_EVERY_S if with_widget else 0.0)]
        if with_widget:
            from tbhooks.views.live import widget  # noqa: PLC0415  anywidget is an extra

            try:
                self._screens.append(widget.WidgetScreen(self, mark))
            except Exception as problem:  # a notebook whose widgets are broken still has the other view
                if required:
                    raise
                self._source.report.error("live view", problem)
        with self._lock, self._guarded():
            self._show_here()
        if not self._ended:
            shell.events.register(CELL_ENDS, self._cell_ends)

    def _show_here(self) -> None:
        self._shown_in = self._shell.execution_count
        with self._pace.drawing():
            self._catch_up()
            for screen in self._screens:
                screen.open(self)

    def _draw(self, *, whole: bool) -> None:
        if self._screens:
            with self._pace.drawing():
                self._catch_up()
                for screen in self._screens:
                    screen.renew(self, whole=whole)
            self.updates += 1
        self._fresh = self._fresh and not whole

    def _cell_ends(self, _result: object = None) -> None:
        """Whoever saves the notebook when a cell has ended saves the last step, too."""
        with self._guarded(counted=False):
            self._source.settle(PATIENCE_S)
        with self._lock, self._guarded():
            if self._fresh and not self._ended:
                self._draw(whole=True)

    def _forget_cells(self) -> None:
        if self._shell is not None and self._cell_ends in self._shell.events.callbacks[CELL_ENDS]:
            self._shell.events.unregister(CELL_ENDS, self._cell_ends)

    @contextmanager
    def _guarded(self, *, counted: bool = True) -> Iterator[None]:
        """Whatever is wrong with a view is nobody else's trouble."""
        started = time.perf_counter()
        try:
            yield
        except Exception as problem:
            self._source.report.error("live view", problem)
        finally:
            self.seconds += counted * (time.perf_counter() - started)


class CellOutput:
    """Text and HTML in the output of a cell, renewed in place through its display id, from any thread."""

    def __init__(self, mark: str = "", every_s: float = 0.0) -> None:
        self._mark, self._every_s = mark, every_s
        self._id = uuid.uuid4().hex
        self._at = 0.0

    def open(self, live: Live) -> None:
        self._send(live, panel.text(live.followed, live.told()), update=False)

    def renew(self, live: Live, *, whole: bool) -> None:
        if whole or time.monotonic() - self._at >= self._every_s:
            told = live.told()
            text = (panel.text if whole else panel.headline)(live.followed, told)
            self._send(live, text, update=True)

    def _send(self, live: Live, text: str, *, update: bool) -> None:
        self._at = time.monotonic()
        html = panel.render_html(live.followed, live.told(), self._mark)
        publish({"text/plain": text, "text/html": html}, display_id=self._id, update=update)


def publish(bundle: Mapping[str, Any], **options: Any) -> None:
    """Sends something to the notebook: from any thread, to the cell that runs or, as an update, wherever its id is."""
    from IPython.display import display  # noqa: PLC0415  only a notebook has it

    display(dict(bundle), raw=True, **options)  # type: ignore[no-untyped-call]


def _key(frame: Frame) -> tuple[int, float, bool]:
    """What a frame is known by: the history replaces it when it is judged, gets late scalars or loses its buckets."""
    return frame.step, frame.time, frame.is_evaluation


def _check(source: Source, kind: str, stat: str) -> None:
    """Raises for what this watch cannot show."""
    check_names("kind", (kind,), (*ALL_KINDS, *(EVALUATION + name for name in ALL_KINDS)))
    check_names("stat", (stat,), STAT_NAMES)
    plain = kind.removeprefix(EVALUATION)
    if plain not in source.kinds:
        raise ArgumentError(f"this watch does not read {plain!r}: it was made with kinds={source.kinds}")
    if stat == "ratio" and plain != "update":
        raise ArgumentError(f"only an update has a ratio, not {kind!r}: kind='update'")


def _wants_widget(interactive: bool | None, shell: Any) -> bool:
    if interactive not in (None, True, False):
        raise ArgumentError(f"interactive is True, False or None for what is there, not {interactive!r}")
    there = importlib.util.find_spec("anywidget") is not None
    if interactive and not there:
        raise ArgumentError('interactive=True needs anywidget: pip install "tbhooks[jupyter]"')
    if interactive and shell is None:
        raise ArgumentError("interactive=True needs a notebook: elsewhere, print the view")
    return shell is not None and there and interactive is not False


def _kernel_shell() -> Any:
    """IPython's shell, if a notebook is on its other side; a terminal would only be flooded."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell


def _troubles(stats: Stats) -> Iterator[str]:
    if stats.dropped:
        yield f"{stats.dropped} logged steps were dropped: see w.stats.messages"
    if stats.errors:
        yield f"{stats.errors} errors of tbhooks were caught: see w.stats.messages"
