"""Ends the output files of a batch."""

from __future__ import annotations

import time

from llamaq.gateway.batches.record import Batch
from llamaq.gateway.batches.redis_row_store import RedisRowStore
from llamaq.gateway.batches.store import BatchStore
from llamaq.gateway.files.record import OUTPUT_PURPOSE, FileRecord
from llamaq.gateway.files.store import FileStore
from llamaq.producer.bulk.input_row import unread_row
from llamaq.producer.bulk.output_lines import unfinished_line
from llamaq.producer.bulk.run_description import RunParameters

LINES_AT_ONCE = 500


async def write_unfinished(run: RunParameters, rows: RedisRowStore, max_line_bytes: int) -> None:
    """Write an error for each row that was not computed before the end of the completion window."""
    message = "the request was not computed within the completion window of the batch"
    count = 0
    async for number, record in rows.records(max_line_bytes):
        line = unfinished_line(run, unread_row(run, number, record), "batch_expired", message)
        rows.add_error(number, line)
        count += 1
        if count % LINES_AT_ONCE == 0:
            await rows.flush()
    await rows.flush()


async def finish_files(store: BatchStore, batch: Batch) -> dict[str, str]:
    """Show the output files of a batch among the files of its API key. Return the fields of the batch that name them.

    A repeated call only changes the expiry of the files.
    """
    request = batch.request
    files = FileStore(store.redis, store.keys, request.owner, max_files_bytes=0)
    now_ms = time.time_ns() // 1_000_000
    fields = {}
    for kind, file_id in (("output", request.output_file_id), ("error", request.error_file_id)):
        n_bytes = batch.number(f"{kind}_bytes")
        if n_bytes:
            fields[f"{kind}_file_id"] = file_id
            await files.save(
                FileRecord(
                    id=file_id,
                    filename=f"{request.id}_{kind}.jsonl",
                    purpose=OUTPUT_PURPOSE,
                    n_bytes=n_bytes,
                    created_ms=now_ms,
                    expires_s=now_ms // 1000 + request.output_ttl_s,
                    is_complete=True,
                )
            )
    return fields
