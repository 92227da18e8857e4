"""Bulk runs: answers each row of a file exactly once, also after crashes."""

from __future__ import annotations

from llamaq.producer.bulk.execute import drop_errors, execute
from llamaq.producer.bulk.output_files import run_id_of
from llamaq.producer.bulk.run_description import BulkProgress, BulkRun, BulkState

__all__ = ["BulkProgress", "BulkRun", "BulkState", "drop_errors", "execute", "run_id_of"]
