"""Serves the newest logged step to Prometheus: scalars as gauges, findings as a counter.

Prometheus asks when it wants; a request reads what the last frames left here and never waits for training.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tbhooks.sinks.scalar_selection import scalar_table, scalars_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LOOPBACK = "127.0.0.1"
_NO_NAME_CHARACTER = re.compile(r"[^a-zA-Z0-9_]")
_LARGEST_PORT = 65535


class PrometheusSink:
    """Serves the numbers of the newest logged step over HTTP, or adds them to a registry of yours.

    `activation.std/encoder.0` is the gauge `tbhooks_activation_std{name="encoder.0"}`, a logged `train/loss` is
    `tbhooks_train{name="loss"}`. `tbhooks_step` is the newest logged step, and `tbhooks_findings_total{rule, severity}`
    counts findings.

    Args:
        port: where to listen; 0 for any free port, which `port` then tells. Not with `registry`.
        scalars: the statistics that become gauges, as in `watch`.
        address: the address to listen on. Other machines can connect only if it is not the loopback address: everyone
            who can reach the port can read the numbers.
        registry: a `prometheus_client.CollectorRegistry` that you serve yourself. Nothing listens then.

    Raises:
        ArgumentError: for a port that is none, or if both or neither of `port` and `registry` are given.
        OSError: if the port is in use.

    """

    def __init__(
        self, port: int | None = None, scalars: object = "core", *, address: str = LOOPBACK, registry: Any = None
    ) -> None:
        if (port is None) == (registry is None):
            raise ArgumentError(
                "PrometheusSink needs a port to listen on, or the registry that you serve, and not both"
            )
        if port is not None and (not isinstance(port, int) or not 0 <= port <= _LARGEST_PORT):
            raise ArgumentError(f"port must be an integer from 0 to {_LARGEST_PORT}, got {port!r}")
        self._table = scalar_table(scalars)
        self._lock = threading.Lock()
        self._step: int | None = None
        self._gauges: dict[str, dict[str, float]] = {}
        self._findings: Counter[tuple[str, str]] = Counter()
        self._server: Any = None
        self._address = address
        self._registry = registry if port is None else self._serve(port)
        self._registry.register(self)

    @property
    def port(self) -> int | None:
        """The port it listens on; None with a registry of yours, and after `close`."""
        return None if self._server is None else int(self._server.server_port)

    @property
    def destination(self) -> str:
        """The address, for messages."""
        return "a Prometheus registry" if self.port is None else f"http://{self._address}:{self.port}/metrics"

    def write(self, frame: Frame) -> None:
        numbers = scalars_of(frame, self._table)
        with self._lock:
            self._step = frame.step
            # A value that is missing now was not finite or not seen: it must not keep its old number.
            kinds = {f"{site.kind}." for site in frame.sites}
            for group in [group for group in self._gauges if any(map(group.startswith, kinds))]:
                del self._gauges[group]
            for tag, number in numbers.items():
                group, _, name = tag.partition("/")
                self._gauges.setdefault(group, {})[name] = number
            self._findings.update((finding.rule, finding.severity) for finding in frame.findings)

    def flush(self) -> None:
        """Not needed: a request reads the newest numbers."""

    def close(self) -> None:
        """Stops to listen, and takes the numbers out of the registry."""
        self._registry.unregister(self)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def collect(self) -> Iterator[Metric]:
        """The metrics, as `prometheus_client` asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        with self._lock:
            step, findings = self._step, dict(self._findings)
            families: dict[str, dict[str, float]] = {}
            for group, numbers in self._gauges.items():
                families.setdefault(f"tbhooks_{_NO_NAME_CHARACTER.sub('_', group)}", {}).update(numbers)
        if step is not None:
            yield GaugeMetricFamily("tbhooks_step", "The newest logged step", value=step)
        counter = CounterMetricFamily("tbhooks_findings", "Findings so far", labels=("rule", "severity"))
        for (rule, severity), count in findings.items():
            counter.add_metric((rule, severity), count)
        yield counter
        for family, values in families.items():
            gauge = GaugeMetricFamily(family, "Of the newest logged step that has it", labels=("name",))
            for name, number in values.items():
                gauge.add_metric((name,), number)
            yield gauge

    def describe(self) -> list[Metric]:
        """Nothing is known before the first logged step."""
        return []

    def _serve(self, port: int) -> Any:
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415

        registry = CollectorRegistry()
        self._server, _ = start_http_server(port, addr=self._address, registry=registry)
        return registry
