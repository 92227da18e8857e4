"""Reads the output that earlier attempts of a job have published."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from redis.exceptions import ResponseError

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Event, TokenSpan
from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.common.redis.write_refusals import is_job_key_error
from llamaq.worker.broker.worker_queue import WorkerQueue

log = logging.getLogger(__name__)

PAGE_EVENTS = 256
"""Number of events that are read at a time."""
MAX_QUICK_BYTES = 64 * 1024
"""Larger events are decoded on a thread. After an outage of Redis, one event has the logprobs of thousands of tokens,
and takes seconds to decode."""
NO_OUTPUT = TokenSpan(0, (), 0, "")


async def read_published(queue: WorkerQueue, job_id: str) -> TokenSpan:
    """Return the output in the stored events, up to the first gap in the offsets. The text is left out.

    A job may have many events. They are read in pages, so that flushes and renewals of other jobs can run between.
    """
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    draws: list[float] = []
    prompt_logprobs: PromptLogprobs | None = None
    cursor = "-"
    while entries := await _read_events(queue, job_id, cursor):
        cursor = f"({entries[-1][0].decode()}"
        for _, fields in entries:
            try:
                event = await _decode(fields.get(b"e", b""))
            except ProtocolError:
                log.warning("job.bad_event id=%s", job_id)
                continue
            if isinstance(event, TokenSpan) and event.offset == len(tokens):
                prompt_logprobs = event.prompt_logprobs or prompt_logprobs
                tokens.extend(event.tokens)
                logprobs.extend(event.logprobs)
                draws.extend(event.draws)
    return TokenSpan(0, tuple(tokens), 0, "", tuple(logprobs), tuple(draws), prompt_logprobs=prompt_logprobs)


async def _decode(data: bytes) -> Event | TokenSpan:
    if len(data) <= MAX_QUICK_BYTES:
        return codec.decode_streamed(data)
    return await asyncio.to_thread(codec.decode_streamed, data)


async def _read_events(queue: WorkerQueue, job_id: str, cursor: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    try:
        page: Any = await queue.redis.xrange(queue.keys.of_job(job_id).events, min=cursor, count=PAGE_EVENTS)
    except ResponseError as exc:
        if not is_job_key_error(exc):
            raise
        return []  # another client overwrote the key
    found: list[tuple[bytes, dict[bytes, bytes]]] = page
    return found
