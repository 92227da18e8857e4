"""Any bytes decode to a model, or raise `InvalidRequest` or `ProtocolError`."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.chat import Message
from llamaq.common.protocol.job_events import Failed, Finished, Started, Tokens, TokenSpan
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result, TokenLogprobs
from llamaq.common.protocol.job_request import JobParams, JobRequest
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs, ScoredToken, row_bytes, row_format
from llamaq.common.protocol.queue_and_worker_state import Worker

LIMIT = 1 << 20

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary()
map_keys = st.text() | st.integers(-5, 2**40)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(map_keys, inner))
fields = st.sampled_from(sorted(JobRequest.model_fields))
requests = st.dictionaries(fields, values, max_size=4).map(lambda found: {"prompt": "x", **found})
packed = st.one_of(st.binary(), (values | requests).map(msgpack.packb))

DEEP = b"\x91" * 100_000
TIMESTAMP = msgpack.packb({"prompt": msgpack.Timestamp(0)})
LONE_SURROGATE = b"\x81\xa6prompt\xa3\xed\xa0\x80"
SHORT_MAP = b"\x81"
LIST_AS_KEY = b"\x81\x90\x01"
HUGE_ARRAY = b"\xdd\xff\xff\xff\xff"


@given(packed)
@example(DEEP)
@example(TIMESTAMP)
@example(LONE_SURROGATE)
@example(SHORT_MAP)
@example(LIST_AS_KEY)
@example(HUGE_ARRAY)
@example(msgpack.packb({"prompt": "x", "metadata": {"a": b"bytes"}}))
def test_any_bytes_decode_to_a_request_or_raise_invalid_request(data: bytes) -> None:
    try:
        request = codec.decode_request(data, LIMIT)
    except InvalidRequest:
        return
    assert isinstance(request, JobRequest)


@given(packed)
@example(DEEP)
@example(TIMESTAMP)
@example(LONE_SURROGATE)
@example(SHORT_MAP)
@example(LIST_AS_KEY)
@example(HUGE_ARRAY)
@example(msgpack.packb({"text": "", "tokens": [inf]}))
@example(msgpack.packb({"text": "", "tokens": [1], "logprobs": [[0, [[inf, 0]]]]}))
@example(msgpack.packb({"seed": inf, "metadata": {}}))
def test_any_bytes_decode_to_an_event_an_output_or_a_model_or_raise_protocol_error(data: bytes) -> None:
    for decode in (
        codec.decode_event,
        codec.decode_streamed,
        codec.decode_output,
        codec.decode_returned,
        lambda data: codec.decode_model(JobStats, data),
        lambda data: codec.decode_model(Worker, data),
    ):
        try:
            decode(data)
        except ProtocolError:
            continue


offsets = st.integers(0, 2**40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
good_requests = st.builds(
    JobRequest,
    prompt=st.text(),
    temperature=st.none() | st.floats(0, 100),
    seed=st.none() | st.integers(0, 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-1e9, 1e9), max_size=5),
    stop=st.lists(st.text(min_size=1, max_size=10), max_size=4).map(tuple),
    metadata=st.dictionaries(st.text(), json_values, max_size=3),
)


@given(good_requests)
def test_a_decoded_request_equals_the_encoded_one(request: JobRequest) -> None:
    assert codec.decode_request(codec.encode_request(request, LIMIT), LIMIT) == request


@given(
    st.one_of(
        st.builds(Started, attempt=st.integers(1, 2**31), worker=st.text()),
        st.builds(
            Tokens,
            offset=offsets,
            text_offset=offsets,
            tokens=st.lists(st.integers(0, 2**31 - 1)).map(tuple),
            text=st.text(),
        ),
        st.builds(Finished, finish_reason=st.sampled_from(FinishReason), stats=st.builds(JobStats)),
        st.builds(Failed, code=st.text(), message=st.text()),
    )
)
def test_a_decoded_event_equals_the_encoded_one(event: Any) -> None:
    assert codec.decode_event(codec.encode_event(event)) == event


@given(st.text(), st.lists(st.integers(0, 2**31 - 1)), st.integers(0, 2**31), st.integers(0, 2**31))
def test_decoded_tokens_and_outputs_equal_the_encoded_ones(
    text: str, tokens: list[int], offset: int, chars: int
) -> None:
    event = Tokens(offset=offset, tokens=tuple(tokens), text_offset=chars, text=text)
    assert codec.decode_event(codec.encode_tokens(offset, tokens, chars, text)) == event
    assert codec.decode_output(codec.encode_output(text, tokens)) == TokenSpan(0, tuple(tokens), 0, text)


@given(st.text(), st.lists(st.integers(0, 2**31 - 1)), st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_streamed_tokens_event_has_the_content_of_the_model(
    text: str, tokens: list[int], offset: int, chars: int
) -> None:
    data = codec.encode_tokens(offset, tokens, chars, text)
    model = codec.decode_event(data)
    assert isinstance(model, Tokens)
    assert codec.decode_streamed(data) == TokenSpan(model.offset, model.tokens, model.text_offset, model.text)
    assert codec.is_tokens_event(data)


logprobs = st.builds(
    TokenLogprobs,
    st.floats(-9999, 0),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-9999, 0)), max_size=3).map(tuple),
)


@given(st.lists(logprobs, min_size=1, max_size=4))
def test_logprobs_are_decoded_as_they_were_encoded(probabilities: list[TokenLogprobs]) -> None:
    tokens = list(range(len(probabilities)))
    span = TokenSpan(3, tuple(tokens), 5, "x", tuple(probabilities))
    assert codec.decode_streamed(codec.encode_tokens(3, tokens, 5, "x", probabilities)) == span
    event = codec.decode_event(codec.encode_tokens(3, tokens, 5, "x", probabilities))
    assert isinstance(event, Tokens)
    assert event.logprobs == span.logprobs
    assert codec.decode_output(codec.encode_output("x", tokens, probabilities)) == span._replace(
        offset=0, text_offset=0
    )


ranks = st.none() | st.integers(1, 2**31 - 1)
scores = st.integers(0, 3).flatmap(
    lambda n_top: st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).flatmap(
        lambda tokens: st.builds(
            PromptLogprobs,
            st.just(tuple(tokens)),
            st.just(n_top),
            st.binary(min_size=row_bytes(n_top) * (len(tokens) - 1), max_size=row_bytes(n_top) * (len(tokens) - 1)),
            st.none() | st.builds(ScoredToken, st.integers(0, 9), st.floats(-9, 0), st.just(((3, -1.5),)), ranks),
        )
    )
)


@given(scores)
def test_the_probabilities_of_a_prompt_are_decoded_as_they_were_encoded(prompt: PromptLogprobs) -> None:
    data = codec.encode_tokens(0, [7], 0, "x", prompt_logprobs=prompt)
    assert codec.decode_streamed(data) == TokenSpan(0, (7,), 0, "x", prompt_logprobs=prompt)
    event = codec.decode_event(data)
    assert isinstance(event, Tokens)
    assert event.prompt_logprobs == prompt
    output = codec.decode_output(codec.encode_output("x", [7], prompt_logprobs=prompt))
    assert output == TokenSpan(0, (7,), 0, "x", prompt_logprobs=prompt)


def test_no_time_is_spent_on_the_compression_of_the_probabilities_of_a_prompt() -> None:
    prompt = PromptLogprobs((0,) * 1001, 1, bytes(row_bytes(1) * 1000))
    assert len(codec.encode_output("x", [7], prompt_logprobs=prompt)) > len(prompt.rows)


@pytest.mark.parametrize(
    "damaged",
    [
        1, "x", [], [[1], 0, b""], [[1, 2], 0, b"1234567", None], [[1, 2], -1, b"", None], [[1], 0, b"", [1]],
        [["a"], 0, b"", None], [[1], 10**18, b"", None], [[-1], 0, b"", None], [[2**40], 0, b"", None],
        [[1, 2], "x", b"", None], [[1, 2], 0, "12345678", None], [[1], 0, b"", [1, -1.0, [2], None]],
    ],
)  # fmt: skip
def test_damaged_probabilities_of_a_prompt_are_refused(damaged: object) -> None:
    event = {"type": "tokens", "offset": 0, "tokens": [1], "text_offset": 0, "text": "", "prompt_logprobs": damaged}
    for decode in (codec.decode_streamed, codec.decode_event):
        with pytest.raises(ProtocolError):
            decode(msgpack.packb(event))


def test_the_entries_of_a_prompt_are_read_as_those_of_a_tuple() -> None:
    rows = row_format(1).pack(-0.5, 1, 9, -0.5) + row_format(1).pack(-2.25, 3, 8, -0.125)
    prompt = PromptLogprobs((5, 9, 7), 1, rows)
    entries = (None, ScoredToken(9, -0.5, ((9, -0.5),), 1), ScoredToken(7, -2.25, ((8, -0.125),), 3))
    assert tuple(prompt) == prompt[:] == entries
    assert (prompt[-1], prompt[1:2], len(prompt)) == (entries[2], entries[1:2], 3)
    with pytest.raises(IndexError):
        prompt[3]
    result = Result(
        job_id="q.0.1", text="", tokens=(), finish_reason=FinishReason.LENGTH, stats=JobStats(), seed=1,
        prompt_logprobs=prompt,
    )  # fmt: skip
    shown = json.loads(result.model_dump_json())["prompt_logprobs"]
    assert shown == [None, {"token": 9, "logprob": -0.5, "top": [[9, -0.5]], "rank": 1}, shown[2]]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_probabilities_of_draws_are_decoded_as_they_were_encoded(draws: list[float]) -> None:
    tokens = list(range(len(draws)))
    data = codec.encode_tokens(3, tokens, 5, "x", draws=draws)
    assert codec.decode_streamed(data) == TokenSpan(3, tuple(tokens), 5, "x", draws=tuple(draws))
    event = codec.decode_event(data)
    assert isinstance(event, Tokens)
    assert event.draws == tuple(draws)


@given(st.sets(st.integers(0, 2**40), min_size=1).map(sorted))
def test_offsets_of_tags_are_decoded_as_they_were_encoded(offsets: list[int]) -> None:
    data = codec.encode_tokens(3, [7], 5, "x", tag_offsets=offsets)
    assert codec.decode_streamed(data) == TokenSpan(3, (7,), 5, "x", tag_offsets=tuple(offsets))
    event = codec.decode_event(data)
    assert isinstance(event, Tokens)
    assert event.tag_offsets == tuple(offsets)
    assert codec.decode_output(codec.encode_output("x", [7], tag_offsets=offsets)).tag_offsets == tuple(offsets)


@pytest.mark.parametrize("wrong", [5, ["x"], [True], [-1], [2, 1], [1, 1]])
def test_wrong_offsets_of_tags_are_refused(wrong: Any) -> None:
    event = {"type": "tokens", "offset": 0, "tokens": [1], "text_offset": 0, "text": "x", "tag_offsets": wrong}
    with pytest.raises(ProtocolError, match="tag_offsets"):
        codec.decode_streamed(msgpack.packb(event))
    with pytest.raises(ProtocolError, match="tag_offsets"):
        codec.decode_output(codec.encode_output("x", [1], tag_offsets=wrong))


started = st.builds(Started, attempt=st.integers(1, 9), worker=st.text())
failed = st.builds(Failed, code=st.text(), message=st.text())


@given(started | failed)
def test_other_streamed_events_are_models(event: Any) -> None:
    data = codec.encode_event(event)
    assert codec.decode_streamed(data) == event
    assert not codec.is_tokens_event(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": -1}, {"offset": "1"}, {"offset": None}, {"offset": True}, {"text_offset": -1}, {"text_offset": 1.5},
        {"tokens": None}, {"tokens": 5}, {"tokens": [1, "2"]}, {"tokens": [-1]}, {"tokens": [2**31]},
        {"tokens": [True]}, {"text": None}, {"text": b"x"}, {"text": ["x"]},
        {"logprobs": 5}, {"logprobs": [[-1.0]]}, {"logprobs": [["x", []]]}, {"logprobs": [[-1.0, [5]]]},
        {"logprobs": [[-1.0, []]] * 2}, {"draws": 5}, {"draws": [0.5, 0.5]}, {"draws": ["x"]}, {"draws": [True]},
    ],
)  # fmt: skip
def test_a_streamed_tokens_event_with_a_wrong_field_is_refused(wrong: dict[str, Any]) -> None:
    event = {"type": "tokens", "offset": 0, "tokens": [1], "text_offset": 0, "text": "x"}
    assert codec.decode_streamed(msgpack.packb(event)) == TokenSpan(0, (1,), 0, "x")
    with pytest.raises(ProtocolError, match=r"not an event|logprobs"):
        codec.decode_streamed(msgpack.packb(event | wrong))


def test_defaults_are_not_encoded() -> None:
    request = JobRequest(prompt="x")
    assert codec.encode_request(request, LIMIT) == msgpack.packb({"prompt": "x"})
    assert codec.decode_request(msgpack.packb({"prompt": "x"}), LIMIT).max_tokens == JobParams().max_tokens


def test_sizes_are_checked_before_anything_is_decoded() -> None:
    with pytest.raises(InvalidRequest, match="more than the allowed 16"):
        codec.decode_request(b"\xc1" * 17, 16)
    with pytest.raises(InvalidRequest, match="max_request_bytes=16"):
        codec.encode_request(JobRequest(prompt="x" * 17), 16)


def test_text_with_invalid_unicode_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        codec.encode_request(JobRequest(prompt="\ud800"), LIMIT)


def test_numbers_and_nesting_that_msgpack_cannot_encode_are_invalid_requests() -> None:
    nested: Any = 1
    for _ in range(2000):
        nested = [nested]
    for metadata, place in (({"m": 1, "n": {"k": 2**70}}, "metadata.n.k: "), ({"n": nested}, "metadata.n.")):
        with pytest.raises(InvalidRequest) as caught:
            codec.encode_request(codec.build_request({"prompt": "x", "metadata": metadata}), LIMIT)
        assert str(caught.value).startswith(place)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("part", [b"\x80", b"\x91" * 49 + b"\x90"], ids=["maps", "nested lists"])
def test_a_request_with_too_many_parts_is_refused_before_it_is_validated(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid parts are not bounded by their number of bytes alone: 4 MiB of them took a minute to validate."""
    n_parts = 4_000_000 // len(part)
    metadata = b"\x81\xa1a\xdd" + n_parts.to_bytes(4) + part * n_parts
    data = b"\x82\xa6prompt\xa1x\xa8metadata" + metadata
    with monkeypatch.context() as only_here:
        only_here.setattr(codec, "build_model", None)  # a call of it would be another error
        with pytest.raises(InvalidRequest, match="more than 200,000 parts"):
            codec.decode_request(data, LIMIT * 1024)
    assert codec.build_request({"prompt": "x", "metadata": {"a": [{}] * 199_000, "b": [1] * 10**6}}).metadata


NESTED: Any = {"name": "f", "parameters": {f"p{n}": {"type": "string"} for n in range(500)}}
CALL: Any = {"function": {"name": "f", "arguments": NESTED}}


@pytest.mark.parametrize(
    ("name", "part"),
    [("tools", NESTED), ("messages", Message.model_validate({"role": "assistant", "tool_calls": [CALL]}))],
)
def test_the_parts_of_tuples_and_messages_count_like_those_of_lists(name: str, part: Any) -> None:
    """Such a request was accepted and encoded, and then refused by the worker."""
    values: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(InvalidRequest, match="more than 200,000 parts"):
        codec.build_request(values | {name: (part,) * 200})
    allowed = codec.build_request(values | {name: (part,) * 190})
    assert codec.decode_request(codec.encode_request(allowed, LIMIT * 8), LIMIT * 8) == allowed


def test_the_error_of_an_invalid_item_says_nothing_about_the_length_of_its_list() -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.build_request({"prompt": "x", "allowed_token_ids": [-5]})
    assert str(refused.value) == "allowed_token_ids.0: Input should be greater than or equal to 0"
    with pytest.raises(InvalidRequest, match="allowed_token_ids: Tuple should have at least 1 item"):
        codec.build_request({"prompt": "x", "allowed_token_ids": []})


def test_unknown_fields_are_ignored_in_events_and_refused_in_requests() -> None:
    newer = msgpack.packb({"type": "failed", "code": "internal", "message": "m", "hint": "new"})
    assert codec.decode_event(newer) == Failed(code="internal", message="m")
    with pytest.raises(InvalidRequest, match="hint"):
        codec.decode_request(msgpack.packb({"prompt": "x", "hint": "new"}), LIMIT)


@pytest.mark.parametrize("n_chars", [0, 1, codec.SHORT_BYTES - 100, codec.SHORT_BYTES + 100, 100_000])
def test_short_and_long_outputs_are_compressed_and_read_again(n_chars: int) -> None:
    text = ("abcdefgh" * n_chars)[:n_chars]
    data = codec.encode_output(text, [1, 2, 3])
    assert codec.decode_output(data).text == text
    assert len(data) < 60 + n_chars / 8


N_INVALID = 20_000
CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "values",
    [
        {"messages": [{}] * N_INVALID},
        {"messages": [{"role": "assistant", "tool_calls": [0] * N_INVALID}]},
        {"messages": [{"role": "user", "content": "a", **{f"x{n}": 0 for n in range(N_INVALID)}}]},
        {"messages": CHAT, "tools": [0] * N_INVALID},
        {"tokens": [""] * N_INVALID},
        {"embed": {"inputs": [0] * N_INVALID}},
        {"embed": {"inputs": [[""] * N_INVALID]}},
        {"prompt": "a", "stop": [0] * N_INVALID},
        {"prompt": "a", "choice": [0] * N_INVALID},
        {"prompt": "a", "samplers": [0] * N_INVALID},
        {"prompt": "a", "dry_sequence_breakers": [0] * N_INVALID},
        {"prompt": "a", "logit_bias": {f"x{n}": "y" for n in range(N_INVALID)}},
        {"prompt": "a", "metadata": {"a": [b""] * N_INVALID}},
        {"prompt": "a", "metadata": {"a": [{0: 0}] * N_INVALID}},
        {"prompt": "a", "metadata": dict.fromkeys(range(N_INVALID))},
        {"prompt": "a", "json_schema": {str(n): b"" for n in range(N_INVALID)}},
        {"prompt": "a", **{f"x{n}": 0 for n in range(N_INVALID)}},
    ],
    ids=range(17),
)
def test_validation_ends_at_the_first_invalid_part(values: dict[str, Any]) -> None:
    """Otherwise an error for each part would be collected: 4 MiB of invalid parts took 8 GB and minutes."""
    with pytest.raises(InvalidRequest) as caught:
        codec.build_request(values)
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() < 10
