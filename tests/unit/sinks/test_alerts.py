"""Which findings become alerts of a tracker."""

from __future__ import annotations

import pytest

import tbhooks
from tbhooks.data.frame import Finding, Site
from tbhooks.sinks.alerts import Alerts


def found(rule: str, severity: str, step: int = 0, path: str = "0") -> Finding:
    return Finding(step, Site(path, "activation"), rule, severity, f"{path} has {rule}")


def test_a_rule_alerts_once_however_many_tensors_and_steps_it_finds() -> None:
    alerts = Alerts("warning")
    (alert,) = alerts.of([found("dead_units", "warning", path=f"layer.{i}") for i in range(8)])
    assert alert.title == "tbhooks: dead_units"
    assert alert.text.splitlines()[0] == "step 0: layer.0 has dead_units"
    assert alert.text.splitlines()[-1] == "and 3 more tensors"
    assert not list(alerts.of([found("dead_units", "warning", step=1)]))


def test_a_rule_alerts_again_when_it_becomes_more_severe_and_not_when_less() -> None:
    alerts = Alerts("info")
    told = [
        alert.severity
        for severity in ("info", "error", "warning", "error")
        for alert in alerts.of([found("divergence", severity)])
    ]
    assert told == ["info", "error"]


@pytest.mark.parametrize(
    ("least", "told"), [(None, []), ("error", ["c"]), ("warning", ["b", "c"]), ("info", list("abc"))]
)
def test_findings_below_the_severity_asked_for_are_left_out(least: str | None, told: list[str]) -> None:
    findings = [found("a", "info"), found("b", "warning"), found("c", "error")]
    assert [alert.title.removeprefix("tbhooks: ") for alert in Alerts(least).of(findings)] == told


def test_an_unknown_severity_is_rejected() -> None:
    with pytest.raises(
        tbhooks.ArgumentError, match="alerts must be one of 'error', 'warning', 'info', or None, got True"
    ):
        Alerts(True)  # type: ignore[arg-type]
