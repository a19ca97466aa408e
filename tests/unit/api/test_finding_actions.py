"""What follows a finding: a call, an exception at the next step, or a wish to stop; nothing unless asked for."""

from __future__ import annotations

from typing import Any

import pytest

import tbhooks
from tbhooks.api.finding_actions import FindingActions
from tbhooks.data.frame import Finding, Site
from tbhooks.data.history import History
from tbhooks.data.self_report import Report
from tests.support.loops import mlp, sgd, train


def found(severity: str, step: int = 2) -> Any:
    def rule(history: Any) -> list[Finding]:
        if history[-1].step != step:
            return []
        return [Finding(step, Site("0", "activation"), "mine", severity, "look here", {})]  # type: ignore[arg-type]

    return rule


def run(reaction: Any, severity: str = "warning", steps: int = 6) -> tuple[tbhooks.Watch, list[int]]:
    model = mlp()
    done: list[int] = []
    watching = tbhooks.watch(model, every=1, rules=[found(severity)]).on_finding(reaction)

    def after(step: int, _: Any) -> None:
        done.append(step)
        watching._worker.wait()

    try:
        train(model, steps, sgd(model), after=after)
    finally:
        watching.close()
    return watching, done


def test_a_callable_is_called_once_with_the_finding() -> None:
    received: list[Finding] = []
    watching, done = run(received.append)
    assert received == watching.findings
    assert [finding.message for finding in received] == ["look here"]
    assert done == list(range(6))


def test_a_callable_that_raises_disturbs_nobody() -> None:
    def broken(_: Finding) -> None:
        raise ValueError("mine")

    watching, done = run(broken)
    assert done == list(range(6))
    assert watching.stats.errors == 1
    assert "on_finding: ValueError: mine" in watching.stats.messages


@pytest.mark.parametrize("severity", ["warning", "error"])
def test_raise_reaches_the_loop_at_the_next_step(severity: str) -> None:
    with pytest.raises(tbhooks.FindingError, match="look here") as caught:
        run("raise", severity)
    assert caught.value.finding.rule == "mine"


def test_information_neither_raises_nor_stops() -> None:
    _, done = run("raise", "info")
    assert done == list(range(6))
    watching, _ = run("stop", "info")
    assert not watching.should_stop


def test_stop_is_a_wish_the_loop_can_read() -> None:
    watching, done = run("stop")
    assert watching.should_stop
    assert done == list(range(6))
    assert not run(lambda _: None)[0].should_stop


def test_an_unknown_reaction_is_refused() -> None:
    with tbhooks.watch(mlp()) as watching, pytest.raises(tbhooks.ArgumentError, match='"raise" or "stop"'):
        watching.on_finding("explode")


def test_a_finding_that_comes_while_the_training_thread_looks_is_raised_the_next_time() -> None:
    class Interrupted(FindingActions):
        """The background thread tells of a finding right after the training thread has seen that there is none."""

        _later: Any = None

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "_to_raise" and self._later is not None:
                finding, self._later = self._later, None
                self._to_raise = finding
            return value

    reactions = Interrupted((), History(), Report())
    reactions._later = finding = Finding(2, Site("0", "activation"), "mine", "warning", "look here", {})
    reactions.raise_if_asked()
    with pytest.raises(tbhooks.FindingError) as raised:
        reactions.raise_if_asked()
    assert raised.value.finding is finding
    reactions.raise_if_asked()
