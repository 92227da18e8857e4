"""The events of a streamed response, with numbers that depend on the text of the answer alone.

An event with new text has the number of its last character. Every other event has the next number. So every server
gives the same number to the same position in the text, with any division of the text into events. Nothing has to be
stored to resume a stream. The numbers increase, but are not consecutive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llamaq.common.errors import JobFailed
from llamaq.common.protocol.job_outcome import Result
from llamaq.gateway.responses.record import ResponseRecord, output_items_of
from llamaq.gateway.responses.response_object import ended_response, failed_response, is_complete, open_response
from llamaq.gateway.timings import timings_object


class EventSequence:
    """The events of one response, from the event after `starting_after` on."""

    def __init__(self, job_id: str, record: ResponseRecord, starting_after: int = -1) -> None:
        self._job_id = job_id
        self._record = record
        self._starting_after = starting_after
        self._output = output_items_of(job_id, record)
        self.last_number = -1
        """The number of the last event so far."""
        self.last_sent = starting_after
        """The number of the last event that the reader has."""

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the text."""
        response = open_response(self._job_id, self._record)
        kinds = ("response.created", "response.in_progress")
        yield from self._numbered({"type": kind, "response": response} for kind in kinds)

    def progress(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return an event about the progress of the prompt.

        A resumed stream does not repeat it. So it takes no number of its own: it has that of the last event.
        """
        response = open_response(self._job_id, self._record)
        return {"type": "response.in_progress", "response": response, **fields, "sequence_number": self.last_number}

    def text(
        self,
        text: str,
        logprobs: Sequence[dict[str, Any]] = (),
        tag_offsets: Sequence[int] = (),
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> Iterator[dict[str, Any]]:
        """Yield the events for the next text, or for the part of it that the reader does not have.

        The other arguments are those of `OutputItems.feed`. Events with new text have the further `fields`.
        """
        for event in self._numbered(self._output.feed(text, logprobs, tag_offsets)):
            yield {**event, **fields} if "delta" in event else event

    def end(self, result: Result, n_reasoning: int) -> Iterator[dict[str, Any]]:
        """Yield the events after the text, of whose tokens `n_reasoning` are reasoning."""
        yield from self._numbered(self._output.finish(is_complete=is_complete(result)))
        response = ended_response(self._job_id, self._record, result, self._output.items, n_reasoning)
        kind = "completed" if response["status"] == "completed" else "incomplete"
        timings = timings_object(result.stats)
        yield from self._numbered([{"type": f"response.{kind}", "response": response, "timings": timings}])

    def failure(self, error: JobFailed) -> Iterator[dict[str, Any]]:
        """Yield the event that ends a response whose job has failed."""
        response = failed_response(self._job_id, self._record, error)
        yield from self._numbered([{"type": "response.failed", "response": response}])

    def _numbered(self, events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            delta = event.get("delta", "")
            self.last_number += len(delta) or 1
            n_new = self.last_number - self._starting_after
            if n_new <= 0:
                continue
            shown = {"delta": delta[-n_new:]} if delta else {}
            yield {**event, **shown, "sequence_number": self.last_number}
