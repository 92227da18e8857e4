"""The numbers of the events of a response depend on its text alone, not on its pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.common.protocol.keys import Keys
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.responses.event_sequence import EventSequence
from llamaq.gateway.responses.record import ResponseRecord, ResponseStore

RECORD = ResponseRecord(model="m", created_s=0, messages=[], n_new=0, shown={})
JOB_ID = "q.0." + "0" * 32


def events_of(pieces: list[str], starting_after: int = -1) -> list[dict[str, Any]]:
    sequence = EventSequence(JOB_ID, RECORD, starting_after)
    result = Result(
        job_id=JOB_ID, text="".join(pieces), tokens=(), finish_reason=FinishReason.STOP, stats=JobStats(), seed=1
    )
    texts = [event for piece in pieces for event in sequence.text(piece)]
    return [*sequence.first(), *texts, *sequence.end(result)]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in events)


@given(st.lists(st.text(max_size=5)), st.lists(st.text(max_size=5)), st.data())
def test_a_stream_resumed_after_any_event_has_exactly_the_rest(
    pieces: list[str], cuts: list[str], data: st.DataObject
) -> None:
    events = events_of(pieces)
    numbers = [event["sequence_number"] for event in events]
    assert all(first < second for first, second in pairwise(numbers))
    seen = data.draw(st.sampled_from(range(len(events))))
    text, other_pieces = "".join(pieces), []
    for cut in cuts:  # the other server has the same text in other pieces
        other_pieces.append(text[: len(cut)])
        text = text[len(cut) :]
    rest = events_of([*other_pieces, text], numbers[seen])
    assert text_of(events[: seen + 1]) + text_of(rest) == "".join(pieces)
    kinds = [event["type"] for event in events[seen + 1 :] if "delta" not in event]
    assert [event["type"] for event in rest if "delta" not in event] == kinds


@pytest.mark.parametrize("response_id", ["", "resp_", "resp_x", JOB_ID, "resp_../../x", "resp_" + "9" * 5000])
async def test_an_id_that_is_none_is_404(response_id: str) -> None:
    store = ResponseStore(None, Keys(), 1)  # type: ignore[arg-type]  # Redis is not asked
    with pytest.raises(RequestRefused) as refused:
        await store.read(response_id, None)
    assert refused.value.http_status == 404
