"""The numbers of the events of a response depend on its text alone, not on its pieces."""

from __future__ import annotations

import re
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
from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE, AnswerForm, AnswerFormat
from llamaq.producer.openai_format.tools import call_id

JOB_ID = "q.0." + "0" * 32
HERMES = AnswerForm(format=AnswerFormat.HERMES, has_tools=True, reasoning_open="<think>", reasoning_close="</think>")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b}"}}\n</tool_call>'
HERMES_TOKENS = HERMES.model_copy(
    update={
        "tag_tokens": {tag: number for number, tag in enumerate(("<think>", "</think>", "<tool_call>", "</tool_call>"))}
    }
)
ANSWERS = [
    (CONTENT_ALONE, "Hello <think>you</think>"),
    (CONTENT_ALONE, ""),
    (HERMES, "Hello"),
    (HERMES, " \n"),
    (HERMES, f"<think>\nWell, </think>\n\nI look. {CALL}\n{CALL}"),
    (HERMES.after("<think>"), f"Well</think>\n\n{CALL}"),
    (HERMES, CALL[:40]),
    (HERMES_TOKENS, f"<think>No ^</think></think>I write ^{CALL}.{CALL}"),
    (HERMES_TOKENS, f"^<think>^{CALL}"),
]


def events_of(form: AnswerForm, pieces: list[str], starting_after: int = -1, **reasoning: str) -> list[dict[str, Any]]:
    shown: Any = {"reasoning": reasoning}
    record = ResponseRecord(model="m", created_s=0, messages=[], n_new=0, shown=shown, form=form)
    sequence = EventSequence(JOB_ID, record, starting_after)
    result = Result(
        job_id=JOB_ID, text="".join(pieces), tokens=(), finish_reason=FinishReason.STOP, stats=JobStats(), seed=1
    )
    first = list(sequence.first())
    texts: list[dict[str, Any]] = []
    offsets = [found.start() for found in re.finditer(r"(?<!\^)</?(think|tool_call)>", result.text)]
    start = 0
    for piece in pieces:  # a tag after ^ is spelled, and every other tag is a token
        own = [offset for offset in offsets if start <= offset < start + len(piece)] if form.tag_tokens else []
        texts += sequence.text(piece, (), own)
        start += len(piece)
    return [*first, *texts, *sequence.end(result, 0)]


def text_of(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return what the deltas add to each item of the output, character by character."""
    return [(event["output_index"], each) for event in events for each in event.get("delta", "")]


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[first:last] for first, last in pairwise(places)]


@given(st.sampled_from(ANSWERS), st.booleans(), st.lists(st.integers(0)), st.lists(st.integers(0)), st.data())
def test_a_stream_resumed_after_any_event_has_exactly_the_rest(
    answer: tuple[AnswerForm, str], has_summary: bool, cuts: list[int], other_cuts: list[int], data: st.DataObject
) -> None:
    form, text = answer
    asked: dict[str, Any] = {"summary": "auto"} if has_summary else {}
    events = events_of(form, pieces_of(text, cuts), **asked)
    numbers = [event["sequence_number"] for event in events]
    assert all(first < second for first, second in pairwise(numbers))
    seen = data.draw(st.sampled_from(range(len(events))))
    rest = events_of(form, pieces_of(text, other_cuts), numbers[seen], **asked)  # the other server has other pieces
    assert text_of(events[: seen + 1]) + text_of(rest) == text_of(events)
    others = [event for event in events[seen + 1 :] if "delta" not in event]
    assert [event for event in rest if "delta" not in event] == others


def test_the_events_of_reasoning_content_and_calls() -> None:
    events = events_of(HERMES, ["<think>Well</think>", "\n\nI look. ", CALL])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Well"}]
    assert output[1]["content"][0]["text"] == "I look."
    assert output[2] == {
        "id": f"fc_{JOB_ID}_2",
        "type": "function_call",
        "status": "completed",
        "call_id": call_id(JOB_ID, 0),
        "name": "f",
        "arguments": '{"a": "b}"}',
    }
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output


def test_reasoning_has_the_form_of_a_summary_if_the_request_asks_for_one() -> None:
    events = events_of(HERMES, ["<think>We", "ll</think>", "Yes"], summary="auto")
    shown = [event for event in events if "summary_index" in event]
    assert [event["type"].removeprefix("response.reasoning_summary_") for event in shown] == [
        "part.added", "text.delta", "text.delta", "text.done", "part.done"
    ]  # fmt: skip
    assert not any(event["type"].startswith("response.reasoning_text") for event in events)
    item = events[-1]["response"]["output"][0]
    assert item["summary"] == [shown[-1]["part"]] == [{"type": "summary_text", "text": "Well"}]
    assert item["content"] == [{"type": "reasoning_text", "text": "Well"}]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES_TOKENS, f"^{CALL[:-12]}^</tool_call>", ["message"]),
        (HERMES_TOKENS, f"x^{CALL[:-12]}^</tool_call>{CALL}", ["message", "function_call"]),
        (HERMES, f"\n\n{CALL}", ["function_call"]),  # white space before a call is no message
        (HERMES, "\n", ["message"]),
        (HERMES, "", ["message"]),
        (HERMES, "\nHello", ["message"]),
        (HERMES, "<think>Well</think>\n\n", ["reasoning"]),
    ],
)
def test_white_space_is_a_message_only_if_there_is_nothing_else(
    form: AnswerForm, text: str, expected: list[str]
) -> None:
    output = events_of(form, list(text))[-1]["response"]["output"]
    assert [item["type"] for item in output] == expected
    if expected == ["message"]:
        assert output[0]["content"][0]["text"] == text


@pytest.mark.parametrize("response_id", ["", "resp_", "resp_x", JOB_ID, "resp_../../x", "resp_" + "9" * 5000])
async def test_an_id_that_is_none_is_404(response_id: str) -> None:
    store = ResponseStore(None, Keys(), 1)  # type: ignore[arg-type]  # Redis is not asked
    with pytest.raises(RequestRefused) as refused:
        await store.read(response_id, None)
    assert refused.value.http_status == 404
