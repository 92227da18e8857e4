"""The metrics in the text format of Prometheus, and the HTTP server."""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.forget_modules import forget_modules

from llamaq.common.errors import InvalidSettings, MissingExtra
from llamaq.common.metrics import metric_definitions as f
from llamaq.common.metrics.exposition import MetricsServer
from llamaq.common.metrics.job_counters import add_job_counters
from llamaq.common.metrics.metric_definitions import Histogram, Samples
from llamaq.common.metrics.optional_server import server_class
from llamaq.common.metrics.worker_samples import add_worker
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot, SlotSnapshot, TickTotals, Worker, WorkerCard

CARD = WorkerCard(
    worker="w1", queue="q", model='a "model"', n_ctx=512, n_ctx_train=512, n_vocab=8, n_parallel=2, quantization="F32",
    chat_template=None, vocab_hash="0" * 64, host="h", pid=1, device="cpu", version="1", started_ms=5000,
)  # fmt: skip


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def served(read: Callable[[], Samples], is_healthy: bool = True) -> MetricsServer:
    return MetricsServer(read, lambda: is_healthy, port=0)


def worker(**values: object) -> Worker:
    slots = (SlotSnapshot(index=0, state="decode", job_id="j"), SlotSnapshot(index=1, state="idle"))
    cache = CacheSnapshot(n_cells=512, reserved_cells=9, used_cells=20)
    return Worker.model_validate({"card": CARD, "cache": cache, "slots": slots, "heartbeat_ms": 1000, **values})


def test_prometheus_can_read_the_metrics_of_a_queue_and_a_worker() -> None:
    samples = Samples()
    add_job_counters(samples, "q", {"bulk:queue_ms:5": 2, "bulk:queue_ms:inf": 1, "bulk:queue_ms:sum": 5000})
    n_buckets = len(f.TICK_DURATION.bounds) + 1
    totals = TickTotals(decode_tokens=7, eval_ms=90, tick_time_counts=(1,) * n_buckets)
    add_worker(samples, worker(totals=totals, tick_age_ms=500), 3000)
    with served(lambda: samples) as server:
        status, text = get(server, "/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {(one.name, *one.labels.values()): one.value for family in families.values() for one in family.samples}
    assert found["llamaq_queue_wait_seconds_bucket", "0.002", "bulk", "q"] == 0
    assert found["llamaq_queue_wait_seconds_bucket", "0.005", "bulk", "q"] == 2
    assert found["llamaq_queue_wait_seconds_bucket", "+Inf", "bulk", "q"] == 3
    assert found["llamaq_queue_wait_seconds_sum", "bulk", "q"] == 5
    assert found["llamaq_worker_slots_busy", "q", "w1"] == 1
    assert found["llamaq_worker_slots_free", "q", "w1"] == 1
    assert found["llamaq_worker_tick_age_seconds", "q", "w1"] == 2.5
    assert found["llamaq_worker_tick_duration_seconds_count", "q", "w1"] == n_buckets
    assert found["llamaq_worker_tick_duration_seconds_sum", "q", "w1"] == 0.09
    assert found["llamaq_worker_batch_tokens_count", "q", "w1"] == 0
    assert families["llamaq_worker_info"].samples[0].labels["model"] == 'a "model"'
    assert families["process_cpu_seconds"].type == "counter"


def test_all_families_have_their_kind_and_no_label_with_unbounded_values() -> None:
    for family in (*f.QUEUE_FAMILIES, *f.WORKER_FAMILIES, *f.READER_FAMILIES):
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert bool(family.bounds) == (family.kind == "histogram"), family.name
        assert not {"job", "job_id", "prompt", "tenant"} & set(family.labels), family.name
        assert family.meaning.endswith("."), family.name


def test_every_family_is_listed_once_and_is_served() -> None:
    defined = {value for value in vars(f).values() if isinstance(value, f.Family)}
    listed = [*f.QUEUE_FAMILIES, *f.WORKER_FAMILIES, *f.READER_FAMILIES]
    assert len(listed) == len(set(listed)) == len(defined)
    samples = Samples()
    add_worker(samples, worker(), 1000)
    assert {family for family, _ in samples} == set(f.WORKER_FAMILIES)
    add_job_counters(samples, "q", {})
    lengths = [(family, value) for family, values in samples for value in values.values()]
    for family, value in lengths:
        if isinstance(value, Histogram):
            assert len(value.counts) in (0, len(family.bounds) + 1), family.name


@pytest.mark.parametrize("path", ["/metrics", "/health", "/other"])
def test_head_has_the_status_of_get_and_no_body(path: str) -> None:
    with served(Samples) as server:
        status, _ = get(server, path)
        with socket.create_connection(("127.0.0.1", server.port)) as connection, connection.makefile("rb") as answer:
            connection.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
            head = answer.read()
    assert head.startswith(f"HTTP/1.0 {status} ".encode())
    assert head.endswith(b"\r\n\r\n"), "no body follows"


@pytest.mark.parametrize(("is_healthy", "status"), [(True, 200), (False, 503)])
def test_health_tells_whether_the_process_works(is_healthy: bool, status: int) -> None:
    with served(Samples, is_healthy) as server:
        assert get(server, "/health")[0] == status
        assert get(server, "/other") == (404, "the paths are /metrics and /health\n")


def test_a_port_that_is_in_use_is_an_error_that_names_it() -> None:
    with served(Samples) as server, pytest.raises(InvalidSettings, match=f"127.0.0.1 port {server.port}"):
        MetricsServer(Samples, lambda: True, port=server.port)


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    forget_modules(monkeypatch, "llamaq.common.metrics.exposition")
    with pytest.raises(MissingExtra, match=r"llamaq metrics needs .* pip install 'llamaq\[metrics\]'"):
        server_class("llamaq metrics")
