from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import JobParams, JobRequest
from llamaq.common.protocol.sampling import SamplingDefaults, SamplingParams


def test_every_sampling_parameter_has_a_worker_default() -> None:
    assert SamplingParams.model_fields.keys() == SamplingDefaults.model_fields.keys()


def test_a_sampling_parameter_of_a_job_replaces_the_default_even_if_it_is_zero() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_k=30)
    resolved = defaults.resolve(SamplingParams(temperature=0, min_p=0.2))
    assert (resolved.temperature, resolved.top_k, resolved.min_p) == (0, 30, 0.2)


def test_the_defaults_of_a_job_are_those_of_the_documentation() -> None:
    params = JobParams()
    assert (params.max_tokens, params.cache_prompt, params.stream) == (None, True, True)
    assert (params.priority, params.grammar_root, params.ignore_eos) == ("interactive", None, False)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "tokens": [1]}, "exactly one"),
        ({"tokens": []}, "tokens is empty"),
        ({"messages": []}, "messages is empty"),
        ({"tokens": [-1]}, "tokens.0"),
        ({"tokens": [2**31]}, "tokens.0"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "timeout_s": float("inf")}, "timeout_s"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 129}, "stop"),
        ({"prompt": "a", "stop": ["x" * 128] * 33}, "stop"),
        ({"prompt": "a", "logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": dict.fromkeys(range(4097), 1.0)}, "logit_bias"),
        ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
        ({"prompt": "a", "min_tokens": 6, "max_tokens": 5}, "min_tokens: 6 is more than max_tokens, which is 5"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": [1] * 257}, "stop_token_ids"),
        ({"prompt": "a", "bad_words": [""]}, "bad_words"),
        ({"prompt": "a", "bad_words": ["x"] * 257}, "bad_words"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [1] * 4097}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [2**31]}, "allowed_token_ids"),
        ({"prompt": "a", "priority": "urgent"}, "priority"),
        ({"prompt": "a", "grammar": "root ::= [a]", "json_schema": {}}, "exclude each other"),
        ({"prompt": "a", "grammar": "x" * 65537}, "larger than 65536"),
        ({"prompt": "a", "regex": "x", "choice": ["y"]}, "regex and choice exclude each other"),
        ({"prompt": "a", "choice": ["x" * 40_000, "y" * 40_000]}, "choice is larger than 65536"),
        ({"prompt": "a", "choice": []}, "choice"),
        ({"prompt": "a", "grammar_root": "1"}, "grammar_root"),
        ({"prompt": "a", "idempotency_key": ""}, "idempotency_key"),
        ({"prompt": "a", "max_new_tokens": 5}, "max_new_tokens"),
        ({"messages": [{"role": "user"}]}, "messages.0: content: a text is required"),
        ({"messages": [{"role": "A B", "content": ""}]}, "messages.0.role"),
        ({"prompt": "a", "metadata": {"x": object()}}, "metadata"),
    ],
)
def test_a_bad_request_names_its_field(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        codec.build_request(values)


def test_an_error_message_does_not_contain_the_private_input() -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.build_request({"prompt": ["my secret prompt"], "metadata": {"name": {"secret"}}})
    assert "secret" not in str(caught.value)


def test_an_empty_text_is_a_valid_prompt() -> None:
    assert codec.build_request({"prompt": ""}).prompt == ""


def test_requests_are_immutable() -> None:
    request = JobRequest(prompt="x")
    with pytest.raises(ValidationError):
        request.prompt = "y"  # type: ignore[misc]


def test_a_message_may_be_empty() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages: Any = [{"role": "assistant", "content": ""}, {"role": "assistant", "tool_calls": [call]}]
    request = JobRequest(messages=messages)
    assert codec.decode_request(codec.encode_request(request, 10_000), 10_000) == request
