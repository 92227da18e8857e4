"""Takes entries that were requeued or whose lease has expired, as a worker does."""

from __future__ import annotations

from llamaq.common.protocol.script_types import StreamEntries
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.stream_scripts import StreamScripts


async def reclaim(
    worker: FakeWorker, stream: str, count: int, lease_ms: int, *, trusted_until_ms: int
) -> StreamEntries:
    """Take entries for this worker, see `StreamScripts.reclaim`."""
    scripts = StreamScripts(worker.redis, worker.keys)
    return await scripts.reclaim(stream, count, lease_ms, trusted_until_ms=trusted_until_ms)
