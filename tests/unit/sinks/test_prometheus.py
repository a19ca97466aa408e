"""What Prometheus gets to read: asked over HTTP as it asks, and parsed by its own client."""

from __future__ import annotations

import math
import socket
import urllib.request
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import tbhooks
from tbhooks.data.frame import EVALUATION, Finding, Site
from tests.support.frames import make_frame
from tests.support.loops import mlp, train


def scraped(sink: Any) -> dict[tuple[str, ...], float]:
    """The values that Prometheus would store, by name and the values of their labels."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def test_the_numbers_are_those_of_the_newest_logged_step() -> None:
    model, memory, sink = mlp(), tbhooks.MemorySink(), tbhooks.PrometheusSink(0)
    with tbhooks.watch(model, [sink, memory], every=2) as watching:
        train(model, 5, after=lambda _, loss: watching.log({"loss": loss}))
        watching.flush()
        found, last = scraped(sink), memory.frames[-1]
    assert found["tbhooks_step",] == last.step == 4
    assert found["tbhooks_activation_std", "0"] == last["0", "activation"].std
    assert found["tbhooks_update_ratio", "0.weight"] == last["0.weight", "update"].ratio
    assert found["tbhooks_train", "loss"] == last.scalars["train/loss"]
    assert watching.stats.errors == 0


def test_it_listens_on_loopback_alone_unless_told_otherwise() -> None:
    sink = tbhooks.PrometheusSink(0)
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
        assert sink.destination == f"http://127.0.0.1:{sink.port}/metrics"
    finally:
        sink.close()
    other = tbhooks.PrometheusSink(0, address="0.0.0.0")
    try:
        assert other._server.server_address[0] == "0.0.0.0"
    finally:
        other.close()


def test_after_close_nothing_listens() -> None:
    sink = tbhooks.PrometheusSink(0)
    port = sink.port
    sink.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert sink.port is None


def test_a_value_that_is_not_finite_any_more_does_not_keep_its_old_number() -> None:
    sink, site = tbhooks.PrometheusSink(0), Site("0", "activation")
    try:
        sink.write(make_frame(0, {site: [1.0, 3.0]}, scalars={"train/loss": 1.0}))
        assert scraped(sink)["tbhooks_activation_mean", "0"] == 2.0
        sink.write(make_frame(1, {site: [np.nan, np.nan]}, scalars={"train/loss": np.nan}))
        found = scraped(sink)
        assert ("tbhooks_activation_mean", "0") not in found
        assert found["tbhooks_activation_nan_count", "0"] == 2
        assert math.isnan(found["tbhooks_train", "loss"])
    finally:
        sink.close()


def test_an_evaluation_leaves_the_numbers_of_training_in_place() -> None:
    sink = tbhooks.PrometheusSink(0)
    try:
        sink.write(make_frame(0, {Site("0", "activation"): [1.0, 3.0]}))
        sink.write(make_frame(0, {Site("0", EVALUATION + "activation"): [5.0, 7.0]}))
        found = scraped(sink)
        assert found["tbhooks_activation_mean", "0"] == 2.0
        assert next(value for (name, *_), value in found.items() if name.endswith("eval_activation_mean")) == 6.0
    finally:
        sink.close()


def test_findings_are_counted_by_rule_and_severity() -> None:
    sink = tbhooks.PrometheusSink(0)
    findings = [Finding(3, Site(path, "activation"), "dead_units", "warning", "dead") for path in "ab"]
    try:
        for step in (3, 4):
            sink.write(make_frame(step, findings=findings))
        assert scraped(sink)["tbhooks_findings_total", "dead_units", "warning"] == 4
    finally:
        sink.close()


def test_a_registry_of_the_user_gets_the_numbers_until_close() -> None:
    registry = CollectorRegistry()
    sink = tbhooks.PrometheusSink(registry=registry)
    sink.write(make_frame(7, {Site('odd "name"\n', "weight"): [3.0]}))
    assert registry.get_sample_value("tbhooks_weight_norm", {"name": 'odd "name"\n'}) == 3.0
    assert sink.port is None
    sink.close()
    assert registry.get_sample_value("tbhooks_step") is None


@pytest.mark.parametrize("port", [-1, 70000, "9090"])
def test_a_port_that_is_none_is_rejected(port: Any) -> None:
    with pytest.raises(tbhooks.ArgumentError, match="port must be an integer from 0 to 65535"):
        tbhooks.PrometheusSink(port)


def test_neither_port_nor_registry_is_rejected_and_both_are() -> None:
    with pytest.raises(tbhooks.ArgumentError, match="a port to listen on, or the registry"):
        tbhooks.PrometheusSink()
    with pytest.raises(tbhooks.ArgumentError, match="and not both"):
        tbhooks.PrometheusSink(0, registry=CollectorRegistry())
