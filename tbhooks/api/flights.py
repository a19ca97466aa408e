"""The flight recorder of a watch (`Watch.flight_recorder`, `Watch.dump`): who starts a dump, and where it goes."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tbhooks.api.extras import ArtifactStep, frame_of_artifacts
from tbhooks.api.finding_actions import FindingActions
from tbhooks.api.lifecycle import Lifecycle
from tbhooks.capture.flight.recorder import DETAILS, FlightRecorder
from tbhooks.capture.flight.rows import FlightCopy
from tbhooks.capture.session import CaptureSession
from tbhooks.data.artifacts import FlightsLeftOut
from tbhooks.data.artifacts.flights import Flight, Named
from tbhooks.data.errors import ArgumentError, check_integer, check_names
from tbhooks.data.frame import Finding, Frame
from tbhooks.data.process.remote import is_remote
from tbhooks.data.self_report import describe_exception
from tbhooks.delivery.worker import Worker
from tbhooks.distributed.flights import FlightExchange

# With fewer steps there is nothing to compare with.
FEWEST_STEPS = 8
_SIGNAL = "SIGUSR1"


class Flights:
    """Starts the flight recorder of one watch, and keeps its dumps."""

    def __init__(self, session: CaptureSession, worker: Worker, lifecycle: Lifecycle, actions: FindingActions) -> None:
        self.dumps: list[Flight] = []
        self._session, self._worker, self._lifecycle, self._actions = session, worker, lifecycle, actions
        self._before: Any = None
        self._exchange: FlightExchange | None = None

    @property
    def _recorder(self) -> FlightRecorder:
        return self._session.flight

    def start(self, steps: int, detail: str, on_signal: bool, burst: int) -> None:
        length = check_integer("steps", steps, least=FEWEST_STEPS)
        check_names("detail", (detail,), DETAILS)
        burst_steps = check_integer("burst", burst, least=0)
        if not isinstance(on_signal, bool):
            raise ArgumentError(f"on_signal must be True or False, got {on_signal!r}")
        if self._recorder.is_started:
            raise ArgumentError("flight_recorder() was called before: a watch has one")
        if not self._lifecycle.is_active:
            return
        if on_signal:
            self._handle_signal()
        self._recorder.start(length, detail, burst_steps, self._send)
        summary, ring = self._recorder.sizes()
        self._session.host_memory.add(beside=summary, other=ring)
        group, sinks = self._lifecycle.context.rank_group, self._lifecycle.run_directory
        if group is not None:
            directory = None if sinks is None or is_remote(sinks) else Path(sinks).absolute()
            rank = self._lifecycle.context.rank
            self._exchange = FlightExchange(rank, group.world, self._request, self._say, directory)
            self._worker.add_poll(self._exchange.poll)
        self._session.samples.subscribe(self._recorder.samples)
        self._actions.on_finding(self._on_finding)
        self._lifecycle.at_end(self._at_end)
        self._lifecycle.at_end_in_background(self._dump_rest, self._finish)

    def dump(self, reason: str) -> None:
        if not isinstance(reason, str) or not reason:
            raise ArgumentError(f"reason must be a text that says why, got {reason!r}")
        if not self._lifecycle.is_active:
            return
        if not self._recorder.is_started:
            raise ArgumentError("there is nothing to dump: call flight_recorder() first")
        self._recorder.dump(reason, self._session.clock.count)

    def _send(self, copy: FlightCopy) -> None:
        self._worker.submit(_FlightStep(copy, self._keep))

    def _keep(self, flight: Flight) -> None:
        """In the background thread."""
        self.dumps.append(flight)
        if self._exchange is not None:
            self._exchange.dumped(flight)

    def _request(self, reason: str, named: Named | None) -> None:
        """The first rank asks for a dump."""
        self._recorder.request(reason, named=named)

    def _say(self, left_out: str) -> None:
        """Writes what is missing in the run."""
        self._lifecycle.report.log_once(f"flight recorder: {left_out}")
        self._worker.submit(ArtifactStep((FlightsLeftOut((left_out,)),), self._session.clock.count))

    def _on_finding(self, finding: Finding) -> None:
        if finding.severity != "info":
            site, rank = finding.site, finding.evidence.get("rank")
            where = "" if site is None else f" at {site}" if rank is None else f" at {site} of rank {rank:g}"
            # The norms in the ring do not show them.
            is_unseen = site is not None and (site.kind == "weight" or finding.rule == "replica_drift")
            named = (finding.step, site.path) if site is not None and is_unseen else None
            reason = f"finding {finding.rule}{where} at step {finding.step}"
            self._recorder.request(reason, is_automatic=True, named=named)

    def _at_end(self, failed: bool) -> None:
        """When capture ends: dumps at once if an exception or a signal ended it."""
        self._restore_signal()
        reason = _why_failed() if failed else None
        if reason is not None:
            self._recorder.dump(reason, self._session.clock.count, at_end=True)

    def _dump_rest(self) -> None:
        """In the background thread, when all steps are judged: makes the dump that is still due."""
        if self._exchange is not None and not self._recorder.is_end_dumped:
            self._exchange_or_report(self._exchange.take_last_requests)
        self._recorder.finish()

    def _finish(self) -> None:
        """In the background thread, after the last dump: writes what was left out."""
        if self._exchange is not None:
            self._exchange_or_report(self._exchange.close)
        if self._recorder.left_out:
            self._worker.submit(
                ArtifactStep((FlightsLeftOut(tuple(self._recorder.left_out)),), self._session.clock.count)
            )

    def _exchange_or_report(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as problem:  # the store of the job may be gone
            self._lifecycle.report.error("dumps of other ranks", problem)

    # SIGUSR1.

    def _handle_signal(self) -> None:
        number = getattr(signal, _SIGNAL, None)
        if number is None or threading.current_thread() is not threading.main_thread():
            raise ArgumentError(f"on_signal=True needs {_SIGNAL}, and a call from the main thread")
        self._before = signal.signal(number, self._on_signal)

    def _restore_signal(self) -> None:
        if self._before is not None:
            number = getattr(signal, _SIGNAL)
            with contextlib.suppress(ValueError):  # not in the main thread: the handler stays, and does nothing
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, self._before)
            self._before = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._recorder.request(_SIGNAL)
        if callable(self._before):
            self._before(number, frame)


def _why_failed() -> str | None:
    """What ended the training; None if the script has only ended itself."""
    problem = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(problem, SystemExit) and problem.code in (None, 0):
        return None
    return "the process was terminated" if problem is None else f"exception {describe_exception(problem)}"


@dataclass(frozen=True)
class _FlightStep:
    """A dump on its way to the sinks. Implements the `Step` of the background thread."""

    copy: FlightCopy
    keep: Callable[[Flight], None]

    @property
    def nbytes(self) -> int:
        return self.copy.nbytes

    def without_numbers(self) -> _FlightStep:
        """Itself: dumps are few, and never dropped."""
        return self

    def frames(self) -> list[Frame]:
        flight = self.copy.flight()
        self.keep(flight)
        return [frame_of_artifacts((flight,), flight.step, flight.time, flight.rank)]
