"""What a body of the OpenAI API asks for, also under the names of llama-server and vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.codec import build_request
from llamaq.common.protocol.job_request import JobRequest
from llamaq.gateway.completions.stream_chunks import delta_of
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Part
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import GenerationBody, read_body
from llamaq.producer.option_synonyms import translate

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> GenerationBody:
    return read_body(Endpoint.CHAT, {"messages": HELLO, **fields})


def job(**fields: Any) -> dict[str, Any]:
    return chat(**fields).only_job


def test_a_choice_of_each_prompt_is_a_job_with_a_seed_of_its_own() -> None:
    body = read_body(Endpoint.COMPLETIONS, {"prompt": ["a", [1, 2]], "n": 2, "seed": 7})
    assert [(each.get("prompt"), each.get("tokens"), each["seed"]) for each in body.jobs] == [
        ("a", None, 7), ("a", None, 8), (None, [1, 2], 7), (None, [1, 2], 8),
    ]  # fmt: skip
    first, *others = (each["seed"] for each in chat(n=4, seed=-1).jobs)
    assert (first, len(set(others))) == (-1, 3), "the default seed of a worker would replace a seed that submit draws"
    first, *others = (each.get("seed") for each in chat(n=4).jobs)
    assert (first, len({*others, None})) == (None, 4)
    assert [each["seed"] for each in chat(n=3, seed=-2).jobs] == [2**63 - 2, 2**63 - 1, 0]
    with pytest.raises(InvalidRequest, match="several answers"):
        _ = body.only_job


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"temperature": 0.5, "user": "eve", "unknown": 1}, {"temperature": 0.5, "tenant": "eve"}),
        ({"logit_bias": {"5": -100}}, {"logit_bias": {"5": -100}}),
        ({"logit_bias": [[5, 1.5], [6, False]]}, {"logit_bias": {5: 1.5, 6: -1e9}}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, {"json_schema": {"a": 1}}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}, {"json_schema": {"a": 1}}),
        ({"response_format": {"type": "json_object", "value": {"a": 1}}}, {"json_schema": {"a": 1}}),
        ({"response_format": {"type": "json", "value": {"a": 1}}}, {"json_schema": {"a": 1}}),
        ({"response_format": {"type": "json_schema", "value": {"schema": {"a": 1}}}}, {"json_schema": {"a": 1}}),
        ({"response_format": {"type": "regex", "value": "[0-9]"}}, {"regex": "[0-9]"}),
        ({"structured_outputs": {"json": {"a": 1}, "regex": None}}, {"json_schema": {"a": 1}}),
        ({"structured_outputs": {"choice": ["x"]}}, {"choice": ["x"]}),
        ({"guided_json": {"a": 1}, "guided_regex": None}, {"json_schema": {"a": 1}}),
        ({"guided_regex": "[0-9]"}, {"regex": "[0-9]"}),
        ({"guided_choice": ["x"]}, {"choice": ["x"]}),
        ({"guided_grammar": "root ::= 1"}, {"grammar": "root ::= 1"}),
        ({"use_beam_search": False}, {}),
        ({"bad_words": ["x"]}, {"bad_words": ["x"]}),
        (
            {"min_tokens": 2.0, "stop_token_ids": [5], "allowed_token_ids": None},
            {"min_tokens": 2, "stop_token_ids": [5]},
        ),
        ({"allowed_token_ids": [4, 5]}, {"allowed_token_ids": [4, 5]}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"service_tier": "flex"}, {"priority": "bulk"}),
        ({"priority": 5}, {"priority": "bulk"}),
        ({"priority": -5}, {}),
        ({"top_p": 0, "stop": []}, {"top_p": 1e-9}),
        ({"typical_p": 0}, {"typical_p": 1e-9}),
        ({"typ_p": 0.0}, {"typ_p": 1e-9}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"stop": ""}, {}),
        ({"t_max_predict_ms": 1500}, {"generation_timeout_s": 1.5}),
        ({"t_max_predict_ms": -1}, {}),
        ({"seed": 2**32 - 1}, {}),
        ({"seed": 2.0**32 - 1}, {}),
        ({"seed": 2**32}, {"seed": 2**32}),
        ({"samplers": "kpt"}, {"samplers": ["top_k", "top_p", "temperature"]}),
        ({"samplers": "typ"}, {"samplers": ["temperature", "typ_p", "top_p"]}),
        ({"samplers": "top_k;temp"}, {"samplers": "top_k;temp"}),
        ({"seed": -2}, {"seed": 2**63 - 2}),
        ({"seed": -(2**63)}, {"seed": 0}),
        ({"response_format": {}}, {}),
        ({"mirostat": True}, {"mirostat": 1}),
        ({"mirostat": False}, {"mirostat": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": False, "top_logprobs": 4}, {}),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, {}),
        ({"tools": []}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
def test_fields_become_job_options(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert chat(**fields).jobs[0] == {"messages": HELLO, **options}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"n_predict": True}, "max_tokens"),
        ({"temp": False}, "temperature"),
        *(
            ({name: False}, name)
            for name in ("top_p", "typical_p", "top_k", "min_tokens", "seed", "repeat_penalty", "dry_base")
        ),
        ({"t_max_predict_ms": True}, "t_max_predict_ms"),
        ({"t_max_predict_ms": "1000"}, "t_max_predict_ms"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"n_probs": True}, "n_probs"),
        ({"stop_token_ids": [True]}, r"stop_token_ids\.0"),
        ({"logit_bias": {"5": True}}, r"logit_bias\.5"),
        ({"lora": [{"id": 0, "scale": True}]}, r"lora\.0"),
    ],
)
def test_a_boolean_is_no_number(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{named}: a number .*is required, not "):
        build_request(translate(chat(**fields).jobs[0]))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"include_usage": "x"}, r"stream_options\.include_usage: true or false is required, not 'x'"),
        ({"continuous_usage_stats": "x"}, r"stream_options\.continuous_usage_stats: true or false"),
        (
            {"include_usage": True, "continuous_usage_stats": 1},
            r"stream_options\.continuous_usage_stats: true or false",
        ),
        ("x", "stream_options: an object is required"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "return_progress": True}])
def test_the_options_of_a_stream_are_booleans(options: object, complaint: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"^{complaint}"):
        chat(stream_options=options, **fields)
    assert chat(stream_options={"include_usage": True, "continuous_usage_stats": None}, **fields).has_usage_chunk
    assert not chat(stream_options=None, **fields).has_usage_chunk


def test_the_best_of_all_answers_are_all_answers() -> None:
    assert len(chat(best_of=2, n=2).jobs) == 2
    with pytest.raises(InvalidRequest, match="best_of"):
        chat(best_of=3, n=2)


def test_only_a_completion_echoes_its_prompt() -> None:
    assert read_body(Endpoint.COMPLETIONS, {"prompt": "a", "echo": True}).is_echoed
    assert not chat(echo=True).is_echoed


@pytest.mark.parametrize(("logprobs", "n_top"), [(0, 0), (3, 3), (True, 0)])
def test_an_echoed_prompt_has_as_many_alternatives_as_the_generated_text(logprobs: object, n_top: int) -> None:
    def job(**fields: object) -> dict[str, Any]:
        return read_body(Endpoint.COMPLETIONS, {"prompt": "a", "logprobs": logprobs, **fields}).jobs[0]

    assert job(echo=True)["prompt_logprobs"] == n_top
    assert "prompt_logprobs" not in job()
    assert job(echo=True, prompt_logprobs=5)["prompt_logprobs"] == 5


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_bulk_run_returns_no_probabilities_in_the_form_of_openai(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: not supported here"):
        _ = read_body(Endpoint.COMPLETIONS, {"prompt": "a", name: 1}).only_job


def test_a_schema_is_an_object() -> None:
    with pytest.raises(InvalidRequest, match="json_schema"):
        chat(structured_outputs={"json": "text"})


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(tool, names)]}}


def test_only_the_allowed_tools_are_shown_and_called() -> None:
    tools = [tool("a"), tool("b")]
    required = chat(tools=tools, tool_choice=allowed("required", "b"))
    assert required.tool_choice.demanded == required.tool_choice.tools == (tool("b"),)
    assert required.jobs[0]["tools"] == [tool("b")]
    auto = chat(tools=tools, tool_choice=allowed("auto", "a", "c"))
    assert (auto.tool_choice.demanded, auto.tool_choice.tools) == ((), (tool("a"),))
    assert "tools" not in chat(tools=tools, tool_choice=allowed("auto", "c")).jobs[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"}, {"tool_choice": "required", "tools": []}, {"tool_choice": tool("a")},
        {"tools": [tool("a")], "tool_choice": allowed("required", "b")},
        {"tools": [tool("a")], "tool_choice": allowed("never", "a")},
        {"tools": [tool("a")], "tool_choice": {"type": "allowed_tools"}},
        {"tools": [tool("a")], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [1]}}},
    ],
)  # fmt: skip
def test_a_call_that_no_tool_can_serve_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        chat(**fields)


def test_too_many_messages_are_refused_in_plain_words() -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: 4097 messages are more than 4096$"):
        chat(messages=HELLO * 4097)


def test_a_user_with_any_name_is_a_tenant() -> None:
    tenant = job(user="Zoë W.")["tenant"]
    assert tenant == job(user="Zoë W.")["tenant"] != job(user="Zoe W.")["tenant"]
    assert tenant.isalnum()


def test_contents_in_parts_and_other_roles_become_plain_messages() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c", "refusal": None, "cache_control": {}},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "d"},
    ]
    assert job(messages=messages)["messages"] == [
        {"role": "system", "content": "a\nb"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": ""},
        {"role": "user", "content": "d"},
    ]  # fmt: skip


def test_a_tool_call_that_was_joined_from_deltas_is_read_without_its_unknown_fields() -> None:
    parts: list[Part] = [CallStarted(0, "weather"), CallArguments(0, '{"city": "Bern"}')]
    started, more = (delta_of(part, "job")["tool_calls"][0] for part in parts)
    function = {"name": "weather", "arguments": more["function"]["arguments"]}
    joined = {**started, "extra": 1, "function": {**function, "parsed_arguments": None}}
    call = {"id": started["id"], "type": "function", "function": function}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [joined]}, {"role": "tool", "content": ""}]
    request = JobRequest.model_validate(job(messages=messages))
    assert request.messages is not None
    assert [each.model_dump() for each in request.messages[1].tool_calls or ()] == [call]
    wrong = [*HELLO, {"role": "assistant", "tool_calls": ["x", {"function": 5}]}]
    assert job(messages=wrong)["messages"][1]["tool_calls"] == ["x", {"function": 5}]


def test_the_answer_continues_a_last_message_of_the_assistant() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    assert job(messages=begun)["continue_final_message"] is True
    assert job(messages=begun)["add_generation_prompt"] is False
    assert job(messages=begun, add_generation_prompt=True)["continue_final_message"] is False
    cut = {"role": "assistant", "content": "", "reasoning_content": "Let me"}
    assert job(messages=[*HELLO, cut])["continue_final_message"] is True
    assert "continue_final_message" not in job()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0}, {"n": 200}, {"functions": [{}]}, {"tools": [{}]}, {"tools": 5},
        {"response_format": {"type": "json_object"}, "grammar": "root ::= 1"}, {"structured_outputs": {"sql": "x"}},
        {"stream": "yes"}, {"store": 1}, {"priority": "high"}, {"top_logprobs": "many"}, {"logit_bias": {"word": 1}},
        {"logit_bias": [[[1], 2]]}, {"logit_bias": [[True, 2]]}, {"t_max_predict_ms": 10**400}, {"user": "\ud800"},
        {"chat_template_kwargs": {"x": 2**64}}, {"chat_template_kwargs": {"x": ["\ud800"]}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": -(2**64)}}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"x": 2**64}}}]}]},
        {"truncate_prompt_tokens": 5},
        {"use_beam_search": True}, {"best_of": 3},
        {"chat_template": "{{ messages }}"}, {"documents": [{"text": "x"}]},
        {"json_schema": -1}, {"json_schema": 1.5}, {"json_schema": True},
        {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_its_name(fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    with pytest.raises(InvalidRequest, match=name):
        chat(**fields)


CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "files.read", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("name", "read"),
    [("Jane Doe", "Jane_Doe"), ("files.read", "files_read"), ("a" * 70, "a" * 64), ("<|x|>", "__x__"), ("", None)],
)
def test_any_name_of_an_author_is_accepted(name: str, read: str | None) -> None:
    """Agents write names of people, and tools such as `files.read`. Other servers accept any text."""
    (message,) = job(messages=[{"role": "user", "name": name, "content": "hi"}])["messages"]
    assert message.get("name") == read


def test_a_tool_may_have_returned_nothing() -> None:
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert job(messages=[*messages, {"role": "tool", "tool_call_id": "c", "content": None}])["messages"][-1] == {
        "role": "tool", "tool_call_id": "c", "content": "",
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match=r"messages\.0\.content"):
        job(messages=[{"role": "user", "content": None}])


def test_a_call_without_arguments_may_have_null_as_its_arguments() -> None:
    call = {**CALL, "function": {"name": "now", "arguments": None}}
    messages = job(messages=[*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}])["messages"]
    (read,) = JobRequest.model_validate({"messages": messages}).messages[-1].tool_calls  # type: ignore[index,misc]
    assert read.function.arguments == "{}"
    for function in ({"name": "now"}, {"name": "now", "arguments": 5}):
        wrong = job(messages=[*HELLO, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}])
        with pytest.raises(InvalidRequest, match="arguments"):
            build_request(wrong)


def test_reasoning_in_the_parts_of_an_answer_is_its_reasoning() -> None:
    """LiteLLM sends answers of Anthropic's API in this form to the servers of its provider `hosted_vllm`."""
    thinking = [{"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking", "data": "AA=="}]
    answer = {"role": "assistant", "content": [*thinking, {"type": "text", "text": "Hello"}]}
    read = {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    assert job(messages=[*HELLO, answer, *HELLO])["messages"][1] == read
    assert job(messages=[*HELLO, {**answer, "reasoning_content": "hm"}, *HELLO])["messages"][1] == read
    of_vllm = {"role": "assistant", "content": "Hello", "reasoning": "hm"}
    assert job(messages=[*HELLO, of_vllm, *HELLO])["messages"][1] == read
    assert job(messages=[*HELLO, {**of_vllm, "reasoning_content": "hm", "reasoning": 5}, *HELLO])["messages"][1] == read
    with pytest.raises(InvalidRequest, match=r"messages\.0\.content\.0\.type: llamaq supports parts of the type text"):
        job(messages=[{"role": "user", "content": thinking}])


@pytest.mark.parametrize("content", ["", " ", None])
def test_an_empty_last_message_of_the_assistant_is_an_answer_that_begins(content: str | None) -> None:
    """Continue sends a space in place of an empty content."""
    empty = {"role": "assistant", "content": content}
    assert job(messages=[*HELLO, empty]) == job()
    assert job(messages=[*HELLO, empty], continue_final_message=True)["messages"][-1]["role"] == "assistant"
    assert job(messages=[*HELLO, {**empty, "tool_calls": [CALL]}])["messages"][-1]["role"] == "assistant"
    assert job(messages=[empty])["messages"] == [{"role": "assistant", "content": content or ""}]
