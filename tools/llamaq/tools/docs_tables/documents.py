"""The documents with tables, and the markers between which the tables are written.

Two comments enclose a table:

    <!-- table: WorkerSettings model,n_ctx -->
    <!-- end -->

The first comment names a model of `models.MODELS`, and optionally the fields to show and their order. Without fields
the table shows all of them. A name of `metrics.METRICS` instead of a model stands for a table of metrics.
"""

from __future__ import annotations

import re
from pathlib import Path

from llamaq.tools.docs_tables.metrics import METRICS, render_metrics
from llamaq.tools.docs_tables.models import MODELS
from llamaq.tools.docs_tables.table import render_table

ROOT = Path(__file__).resolve().parents[4]

MARKED = re.compile(r"(<!-- table: (?P<model>\w+)(?: (?P<fields>[\w,]+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def documents() -> list[Path]:
    """Return the paths of all documents that may contain tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill_in(text: str, name: str) -> str:
    """Return the text of a document with newly rendered tables.

    Args:
        text: The document.
        name: Name of the document, for error messages.

    Raises:
        ValueError: A marker names a model or a field that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        if match["model"] in METRICS:
            return match[1] + render_metrics(METRICS[match["model"]]) + match[4]
        model = MODELS.get(match["model"])
        if model is None:
            raise ValueError(f"{name}: there is no model {match['model']}")
        fields = match["fields"].split(",") if match["fields"] else list(model.model_fields)
        unknown = sorted(set(fields) - set(model.model_fields))
        if unknown:
            raise ValueError(f"{name}: {match['model']} has no field {', '.join(unknown)}")
        return match[1] + render_table(model, fields) + match[4]

    return MARKED.sub(replace, text)


def tables_in(text: str) -> list[tuple[str, list[str]]]:
    """Return the model and the fields of each table in a document. A table of metrics has its name and the metrics."""
    return [
        (found["model"], found["fields"].split(",") if found["fields"] else _all_rows(found["model"]))
        for found in MARKED.finditer(text)
    ]


def _all_rows(name: str) -> list[str]:
    if name in METRICS:
        return [family.name for family in METRICS[name]]
    return list(MODELS[name].model_fields)
