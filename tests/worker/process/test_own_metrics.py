"""The port at which a worker serves its own metrics."""

from __future__ import annotations

import sys
import urllib.request
from contextlib import nullcontext
from typing import NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.forget_modules import forget_modules
from tests.support.worker_cards import make_card

from llamaq.common.errors import InvalidSettings, MissingExtra
from llamaq.common.metrics import metric_definitions as f
from llamaq.common.metrics.exposition import MetricsServer
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot, TickStats, Worker
from llamaq.worker.engine_loop.telemetry import Telemetry
from llamaq.worker.process.own_metrics import bind_metrics_server
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings


def not_called(*_: object) -> NoReturn:
    raise AssertionError("the worker is not asked for its state")


def test_without_a_port_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert isinstance(bind_metrics_server(WorkerSettings(), not_called, not_called), nullcontext)


def test_a_port_that_cannot_be_used_is_an_error_before_the_model_is_loaded() -> None:
    settings = WorkerSettings(metrics_port=1, metrics_bind="192.0.2.1")
    with pytest.raises(InvalidSettings, match=r"192\.0\.2\.1 port 1"):
        bind_metrics_server(settings, not_called, not_called)


def test_without_prometheus_client_the_error_names_the_option_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    forget_modules(monkeypatch, "llamaq.common.metrics.exposition")
    with pytest.raises(MissingExtra, match=r"llamaq worker --metrics-port needs .*llamaq\[metrics\]"):
        bind_metrics_server(WorkerSettings(metrics_port=0), not_called, not_called)


def test_the_ticks_of_the_worker_are_counted_by_duration_and_batch_size() -> None:
    telemetry = Telemetry()
    for batch_size, eval_ms in ((1, 4.0), (5, 4.0), (600, 90.0)):
        telemetry.record_tick(
            TickStats(
                batch_size=batch_size,
                decode_tokens=1,
                prefill_tokens=batch_size - 1,
                active_slots=1,
                queue_depth=0,
                eval_ms=eval_ms,
            )
        )
    cache = CacheSnapshot(n_cells=8, reserved_cells=0)

    def describe(now_ms: int) -> Worker:
        return Worker(card=make_card(), cache=cache, totals=telemetry.totals, heartbeat_ms=now_ms)

    server = bind_metrics_server(WorkerSettings(metrics_port=0), describe, lambda: True)
    assert isinstance(server, MetricsServer)
    with server, urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        families = {one.name: one.samples for one in text_string_to_metric_families(answer.read().decode())}
    ticks = {one.labels.get("le", one.name): one.value for one in families[f.TICK_DURATION.name]}
    sizes = {one.labels.get("le", one.name): one.value for one in families[f.BATCH_SIZE.name]}
    assert (ticks["0.003"], ticks["0.005"], ticks["0.07"], ticks["0.1"], ticks["+Inf"]) == (0, 2, 2, 3, 3)
    assert ticks[f"{f.TICK_DURATION.name}_sum"] == pytest.approx(0.098)
    assert (sizes["1.0"], sizes["4.0"], sizes["8.0"], sizes["512.0"], sizes["1024.0"]) == (1, 1, 2, 2, 3)
    assert sizes[f"{f.BATCH_SIZE.name}_sum"] == 606


@pytest.mark.parametrize(("port", "ports"), [(9541, [9541, 9542]), (0, [0, 0]), (None, [None, None])])
def test_each_worker_of_a_supervisor_has_a_port_of_its_own(port: int | None, ports: list[int | None]) -> None:
    supervisor = Supervisor.of_devices(WorkerSettings(devices=(0, 1), metrics_port=port))
    assert [child.settings.metrics_port for child in supervisor.children] == ports
