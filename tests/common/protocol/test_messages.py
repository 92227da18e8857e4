from __future__ import annotations

from typing import Any

import msgpack
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


NUMBERS = [
    *("adaptive_decay", "adaptive_target", "cache_public", "deadline_s", "delay_s", "draft_max"),
    *("dry_allowed_length", "dry_base", "dry_multiplier", "dry_penalty_last_n", "dynatemp_exponent", "dynatemp_range"),
    *("frequency_penalty", "generation_timeout_s", "logprobs", "max_tokens", "min_keep", "min_p", "min_tokens"),
    *("mirostat", "mirostat_eta", "n_indent"),
    *("mirostat_tau", "penalty_last_n", "presence_penalty", "prompt_logprobs", "reasoning_budget", "repeat_penalty"),
    *("queue_timeout_s", "retries", "run_at", "seed", "slot", "temperature", "timeout_s", "top_k", "top_n_sigma"),
    *("top_p", "typical_p", "xtc_probability", "xtc_threshold"),
]
"""The options of a job that are numbers."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_boolean_is_no_number_for_a_client_and_for_a_worker(name: str) -> None:
    with pytest.raises(ValidationError, match=rf"{name}\n.*a number is required, not a boolean"):
        JobParams(**{name: True})
    for value in (True, False):
        with pytest.raises(InvalidRequest, match=f"^{name}: a number is required, not a boolean$"):
            codec.decode_request(msgpack.packb({"prompt": "a", name: value}), 1000)


def test_the_other_options_are_no_numbers() -> None:
    schemas = JobParams.model_json_schema()["properties"]
    kinds = {name: [schema, *schema.get("anyOf", ())] for name, schema in schemas.items()}
    numbers = {name for name, each in kinds.items() if {"integer", "number"} & {one.get("type") for one in each}}
    assert numbers == set(NUMBERS)


@pytest.mark.parametrize("scale", [-100.5, 101, 1e4])
def test_a_scale_of_an_adapter_with_which_numbers_overflow_is_refused(scale: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^lora\.a: "):
        codec.build_request({"prompt": "a", "lora": {"a": scale}})


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"allowed_token_ids": [5, True]}, "allowed_token_ids.1"),
        ({"stop_token_ids": [False]}, "stop_token_ids.0"),
        ({"logit_bias": {5: False}}, "logit_bias.5"),
        ({"logit_bias": {True: 1.0}}, "logit_bias.*"),
        ({"lora": {"a": True}}, "lora.a"),
    ],
)
def test_a_boolean_is_no_number_inside_an_option(values: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{place}: a number is required, not a boolean$"):
        codec.build_request({"prompt": "a", **values})


def test_numbers_and_booleans_have_the_values_that_they_had() -> None:
    numbers = {"min_tokens": 1.0, "max_tokens": "5", "temperature": 1, "cache_public": "system", "seed": None}
    others = {"stop_token_ids": [1.0], "logit_bias": {"5": 1}, "ignore_eos": 1, "stream": False}
    request = codec.build_request({"prompt": "a", **numbers, **others})
    assert (request.min_tokens, request.max_tokens, request.temperature, request.cache_public) == (1, 5, 1.0, "system")
    assert (request.stop_token_ids, request.logit_bias, request.seed) == ((1,), {5: 1.0}, None)
    assert (request.ignore_eos, request.stream) == (True, False)
    assert codec.decode_request(codec.encode_request(request, 1000), 1000) == request


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
