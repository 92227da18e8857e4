"""The queries of the Grafana dashboard and of the alert rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "llamaq.json"
ALERTS = FOLDER / "alerts.yml"

_THRESHOLD = re.compile(r"\s*(?:==|!=|>=|<=|>|<)\s*[\d.]+")


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel or an alert."""

    where: str
    """The title of the panel, or the name of the alert."""
    expression: str


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panel_queries() -> Iterator[Query]:
    """Yield the queries of all panels, with the variables of the dashboard as they are."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["expr"])


def alert_queries() -> Iterator[Query]:
    for rule in rules():
        yield Query(rule["alert"], rule["expr"])


def without_variables(expression: str, rate_interval: str) -> str:
    """Return a query as Grafana sends it if all queues and priorities are selected."""
    return expression.replace("$__rate_interval", rate_interval).replace("$queue", ".*").replace("$priority", ".*")


def without_thresholds(expression: str) -> str:
    """Return the query of an alert without its comparisons with numbers: it has data also if no alert fires."""
    return _THRESHOLD.sub("", expression)
