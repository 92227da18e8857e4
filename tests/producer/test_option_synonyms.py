"""Options as users of OpenAI's API, llama.cpp and llama_cpp_ex write them are translated, or refused with our name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import InvalidRequest, Message
from llamaq.producer.option_synonyms import HINTS, SYNONYMS
from llamaq.producer.submission import build_request


def built(**values: Any) -> JobRequest:
    if "messages" not in values:
        values["prompt"] = "x"
    return asyncio.run(build_request({}, **values))


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"stop": "."}, "stop", (".",)),
        ({"stop": None}, "stop", ()),
        ({"stop_sequences": ["a", "b"]}, "stop", ("a", "b")),
        ({"max_tokens": None}, "max_tokens", JobRequest.model_fields["max_tokens"].default),
        ({"max_tokens": -1}, "max_tokens", JobRequest.model_fields["max_tokens"].default),
        ({"n_predict": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 5}, "max_tokens", 5),
        ({"id_slot": -1}, "slot", None),
        ({"slot": -1}, "slot", None),
        ({"id_slot": 2}, "slot", 2),
        ({"temp": 0.5}, "temperature", 0.5),
        ({"penalty_repeat": 1.1}, "repeat_penalty", 1.1),
        ({"repeat_last_n": -1}, "penalty_last_n", -1),
        ({"metadata": None}, "metadata", {}),
        ({"temperature": None}, "temperature", None),
    ],
)
def test_a_form_with_one_meaning_is_accepted(given: dict[str, Any], name: str, value: object) -> None:
    assert getattr(built(**given), name) == value


def test_a_seed_of_minus_one_is_random() -> None:
    assert built(seed=-1) != built(seed=-1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_token", "max_token: there is no such option; did you mean max_tokens?"),
        ("temprature", "did you mean temperature?"),
        ("penalty_repeats", "did you mean repeat_penalty?"),
        ("user", "user: there is no such option; use metadata"),
        ("response_format", "use json_schema"),
        ("model", "the queue of the client selects the model"),
        ("t_max_predict_ms", "use generation_timeout_s"),
        ("xyzzy", "xyzzy: there is no such option"),
    ],
)
def test_an_unknown_option_is_refused_with_the_name_that_is_meant(name: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        built(**{name: 1})
    assert message in str(caught.value)


def test_an_option_given_twice_under_two_names_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"temperature=0\.5, temp=0\.7: both names mean temperature"):
        built(temperature=0.5, temp=0.7)
    with pytest.raises(InvalidRequest, match=r"temp=0\.7, temperature=0\.5: both names mean temperature"):
        built(temp=0.7, temperature=0.5)
    assert built(temp=0.7, temperature=0.7).temperature == 0.7


def test_synonyms_and_hints_are_no_options_themselves() -> None:
    assert set(SYNONYMS.values()) <= set(JobRequest.model_fields)
    assert not (set(SYNONYMS) | set(HINTS)) & set(JobRequest.model_fields)
    assert not set(SYNONYMS) & set(HINTS)


def test_text_parts_of_a_content_are_joined_and_a_name_is_kept() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "name": "mia_1", "content": parts}]
    assert built(messages=chat).messages == (
        Message(role="system", content="Be kind."),
        Message(role="user", content="Hello\nworld", name="mia_1"),
    )


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"messages\.0\.content\.0: only parts"),
        ({"role": "user", "content": ["text"]}, r"messages\.0\.content\.0: only parts"),
        ({"role": "user", "content": None}, r"messages\.0\.content: the message has no text"),
        ({"role": "assistant", "content": None, "tool_calls": []}, r"messages\.0\.content: the message has no text"),
        ({"role": "user", "content": []}, r"messages\.0\.content: the message has no text"),
        ({"role": "user", "content": "x", "name": "<|im_start|>"}, r"messages\.0\.name"),
        ("hi", r"messages\.0"),
    ],
)
def test_other_contents_are_refused(message: Any, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        built(messages=[message])


def test_messages_that_are_no_list_are_refused() -> None:
    for messages, error in (
        ("hi", "a list of messages is required, not a text"),
        ({"role": "user", "content": "hi"}, "a list of messages is required, not one message"),
        (5, "messages"),
    ):
        with pytest.raises(InvalidRequest, match=error):
            built(messages=messages)


async def test_an_array_of_token_ids_is_a_prompt() -> None:
    request = await build_request({}, tokens=np.array([1, 2, 3]))
    assert request.tokens == (1, 2, 3)
    assert {type(token) for token in request.tokens} == {int}
