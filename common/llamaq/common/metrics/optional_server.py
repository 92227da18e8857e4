"""Returns the class of the metrics server, or tells which extra is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamaq.common.errors import MissingExtra

if TYPE_CHECKING:
    from llamaq.common.metrics.exposition import MetricsServer


def server_class(feature: str) -> type[MetricsServer]:
    """Return the class of the server.

    Args:
        feature: What needs the server, for the error message.

    Raises:
        MissingExtra: prometheus-client is not installed.
    """
    try:
        from llamaq.common.metrics.exposition import MetricsServer
    except ModuleNotFoundError as exc:
        if exc.name is None or not exc.name.startswith("prometheus_client"):
            raise
        raise MissingExtra(feature, "metrics") from exc
    return MetricsServer
