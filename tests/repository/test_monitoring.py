"""The dashboard, the alert rules and the page about monitoring name only metrics that llamaq serves. Prometheus is not
needed; `make check-monitoring` runs every query on a real one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry
from tests.monitoring.queries import (
    FOLDER,
    Query,
    alert_queries,
    dashboard,
    panel_queries,
    rules,
    without_thresholds,
    without_variables,
)

from llamaq.common.metrics import metric_definitions as f
from llamaq.common.metrics.exposition import SamplesCollector
from llamaq.common.metrics.metric_definitions import Family, Histogram, Samples

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
FAMILIES = (*f.QUEUE_FAMILIES, *f.WORKER_FAMILIES, *f.READER_FAMILIES)
QUERIES = [*panel_queries(), *alert_queries()]
OF_PROMETHEUS = {"up"}


def exposed() -> dict[str, set[str]]:
    """Return the labels of each series that llamaq serves, by its name."""
    samples = Samples()
    for family in FAMILIES:
        value: float | Histogram = Histogram((0,) * (len(family.bounds) + 1), 0) if family.bounds else 1
        samples.set(family, tuple("x" for _ in family.labels), value)
    registry = CollectorRegistry()
    registry.register(SamplesCollector(lambda: samples))
    parsed = text_string_to_metric_families(generate_latest(registry).decode())
    return {one.name: set(one.labels) for family in parsed for one in family.samples}


EXPOSED = exposed()


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_query_names_series_and_labels_that_llamaq_serves(query: Query) -> None:
    names = set(re.findall(r"\bllamaq_\w+", query.expression))
    assert names or query.expression.startswith("up{")
    assert names <= EXPOSED.keys()
    for name, selector in re.findall(r"\b(llamaq_\w+)\{([^}]*)\}", query.expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert labels <= EXPOSED[name], query.expression
    grouped = {
        label.strip() for group in re.findall(r"(?:by|on) \(([^)]*)\)", query.expression) for label in group.split(",")
    }
    assert grouped <= {label for labels in EXPOSED.values() for label in labels}


def test_the_dashboard_shows_every_metric_of_queues_and_workers() -> None:
    shown = " ".join(query.expression for query in panel_queries())
    assert [
        family.name for family in FAMILIES if not re.search(rf"\b{family.name}(_bucket|_sum|_count)?\b", shown)
    ] == []


def test_every_panel_has_its_own_id_a_description_a_unit_and_only_known_variables() -> None:
    loaded = dashboard()
    panels = loaded["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in loaded["templating"]["list"]}
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= variables | {"__rate_interval"}, panel["title"]


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own


def test_the_page_explains_every_alert_and_every_rule_has_a_severity_and_a_summary() -> None:
    explained = re.findall(r"^\| `(Llamaq\w+)`", PAGE, re.MULTILINE)
    assert explained == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]


def test_every_alert_rule_compares_with_a_threshold_that_the_check_can_remove() -> None:
    for query in alert_queries():
        bare = without_thresholds(query.expression)
        assert bare != query.expression
        assert not re.search(r"[<>]\s*\d", bare), bare


def test_the_variables_of_the_dashboard_are_replaced_as_grafana_does() -> None:
    assert without_variables('rate(a{queue=~"$queue"}[$__rate_interval])', "1m") == 'rate(a{queue=~".*"}[1m])'


def test_the_tests_of_the_alerts_use_only_series_that_llamaq_serves() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    series = [entry["series"] for test in tests for entry in test["input_series"]]
    assert {one.partition("{")[0] for one in series} <= EXPOSED.keys()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_page_has_every_metric_with_its_meaning(family: Family) -> None:
    assert f"| `{family.name}` | {family.kind} |" in PAGE
    assert family.meaning in PAGE


def test_the_page_names_no_metric_that_does_not_exist() -> None:
    known = {family.name for family in FAMILIES} | EXPOSED.keys() | {"llamaq_queue"}
    assert set(re.findall(r"\bllamaq_[a-z_]+\w", PAGE)) <= known
