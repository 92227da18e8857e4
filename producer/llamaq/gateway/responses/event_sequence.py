"""The events of a streamed response, with numbers that depend on the text alone.

The number of an event is the position that it has reached: the events before the text have fixed numbers, a piece of
text has the number of characters up to its end, and the events after the text follow. So every server gives the same
number to the same place, however the text is cut into pieces, and nothing has to be stored to resume a stream. The
numbers increase, but are not consecutive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llamaq.common.errors import JobFailed
from llamaq.common.protocol.job_outcome import Result
from llamaq.gateway.responses.record import ResponseRecord
from llamaq.gateway.responses.response_object import (
    ended_response,
    failed_response,
    item_id,
    message_item,
    open_response,
    text_part,
)

N_FIRST = 4
"""Number of the events before the text. The text begins after the number `N_FIRST` - 1."""


class EventSequence:
    """The events of one response, from the event after `starting_after` on."""

    def __init__(self, job_id: str, record: ResponseRecord, starting_after: int = -1) -> None:
        self._job_id = job_id
        self._record = record
        self._starting_after = starting_after
        self._n_chars = 0
        """Number of characters of the text so far."""
        self._place = {"item_id": item_id(job_id), "output_index": 0, "content_index": 0}

    @property
    def last_number(self) -> int:
        """The number of the last event so far."""
        return N_FIRST - 1 + self._n_chars

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the text."""
        response = open_response(self._job_id, self._record)
        item = message_item(self._job_id, "", "in_progress")
        yield from self._numbered(
            0,
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.content_part.added", **self._place, "part": text_part("")},
        )

    def text(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the event with the next text, or with the part of it that the reader does not have."""
        self._n_chars += len(text)
        n_new = min(self.last_number - self._starting_after, len(text))
        if n_new > 0:
            delta = {"type": "response.output_text.delta", **self._place, "delta": text[-n_new:], "logprobs": []}
            yield {**delta, "sequence_number": self.last_number}

    def end(self, result: Result) -> Iterator[dict[str, Any]]:
        """Yield the events after the text."""
        response = ended_response(self._job_id, self._record, result)
        (item,) = response["output"]
        kind = "completed" if response["status"] == "completed" else "incomplete"
        yield from self._numbered(
            self.last_number + 1,
            {"type": "response.output_text.done", **self._place, "text": result.text, "logprobs": []},
            {"type": "response.content_part.done", **self._place, "part": text_part(result.text)},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": f"response.{kind}", "response": response},
        )

    def failure(self, error: JobFailed) -> Iterator[dict[str, Any]]:
        """Yield the event that ends a response whose job has failed."""
        response = failed_response(self._job_id, self._record, error)
        yield from self._numbered(self.last_number + 1, {"type": "response.failed", "response": response})

    def _numbered(self, number: int, *events: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for each, event in enumerate(events, number):
            if each > self._starting_after:
                yield {**event, "sequence_number": each}
