"""The requests of frameworks and programs, as their sources build them. The frameworks themselves are not needed.

The model has random weights, so grammars stand for what a trained model decides by itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.http_clients import http_client

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
UNIT: dict[str, Any] = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
WEATHER: dict[str, Any] = {"name": "weather", "description": "The weather.", "parameters": UNIT}
TOOL: dict[str, Any] = {"type": "function", "function": WEATHER}
ARGUMENTS = '{"unit": "C"}'
CALLS = [{"id": "abcdef012", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}]
HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be short."}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

DIFY: dict[str, Any] = {
    "stream": True,
    "temperature": 0.7,
    "top_p": 1.0,
    "max_tokens": 8,
    "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    "thinking": {"type": "disabled"},
    "enable_thinking": False,
    "stream_options": {"include_usage": True},
    "messages": [
        SYSTEM,
        HELLO,
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": "20", "tool_call_id": "abcdef012"},
    ],
    "tool_choice": "auto",
    "tools": [TOOL],
    "user": "2f7b1e0c-41fd-4f6e-9d0f-1c6d3a5e8b77",
}
"""Dify's plugin `openai_api_compatible` in its extended mode (models/llm/llm.py)."""
LM_EVAL: dict[str, Any] = {
    "messages": [{**SYSTEM, "type": "text"}, {**HELLO, "type": "text"}],
    "max_tokens": 8,
    "temperature": 0,
    "stop": ["\n\n", "Q:"],
    "seed": 1234,
}
"""`local-chat-completions` of lm-eval (lm_eval/models/api_models.py). Its messages have a type."""
LANGCHAIN_JS: dict[str, Any] = {
    "temperature": 0.7,
    "max_tokens": 8,
    **USAGE,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": [], "name": "AI Agent", "tool_calls": CALLS},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdef012", "content": [{"type": "text", "text": "20"}]},
    ],
    "tools": [{"type": "function", "function": {**WEATHER, "strict": False}}],
}
"""n8n, Flowise and LibreChat use LangChain's package for JavaScript (src/converters/completions.ts)."""
LANGCHAIN_JS_RESPONSE: dict[str, Any] = {
    "max_output_tokens": 8,
    "stream": False,
    "input": [
        {"type": "message", "role": "system", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": ""}]},
        {"type": "message", "role": "assistant", "content": [{"type": "input_text", "text": "I look."}]},
        {"type": "function_call", "name": "weather", "call_id": "abcdef012", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "abcdef012", "output": "20", "status": "completed"},
    ],
    "tools": [{"type": "function", "strict": None, **WEATHER}],
    "text": {},
    "service_tier": "auto",
    "top_logprobs": 0,
}
"""The same package with `useResponsesApi`, as n8n sets it (src/converters/responses.ts)."""
JAN: dict[str, Any] = {
    **USAGE,
    "messages": [SYSTEM, HELLO],
    "temperature": 0.7,
    "top_k": 2,
    "top_p": 0.95,
    "repeat_penalty": 1.12,
    "max_output_tokens": 8,
    "max_tokens": 8,
    "ctx_len": 8192,
}
"""Jan adds the parameters of its assistants to the body (web-app/src/lib/model-factory.ts)."""
AIDER: dict[str, Any] = {
    "stream": True,
    "temperature": 0,
    "max_tokens": 8,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Edit.", "cache_control": {"type": "ephemeral"}}]},
        HELLO,
        {"role": "assistant", "content": "Once", "prefix": True},
    ],
}
"""Aider continues an answer that was cut off (aider/coders/base_coder.py)."""
HOSTED_VLLM: dict[str, Any] = {
    "max_tokens": 8,
    "messages": [
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Greet."},
                {"type": "redacted_thinking", "data": "AA=="},
                {"type": "text", "text": "Hello"},
            ],
        },
        HELLO,
    ],
}
"""LiteLLM's provider `hosted_vllm`, for a conversation that began in Anthropic's API."""
PROMPTFOO: dict[str, Any] = {
    "prompt": "Hello",
    "max_tokens": 8,
    "temperature": 0,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "best_of": 1,
    "logprobs": True,
    "stop": ["<|im_end|>", "<|endoftext|>"],
}
"""promptfoo's provider `openai:completion`. Unlike OpenAI's own `logprobs`, its value is a boolean."""
PROMPTFOO_LLAMA: dict[str, Any] = {
    "prompt": "Hello",
    "n_predict": 8,
    "n_keep": 4,
    "penalize_nl": False,
    "mirostat": True,
}
"""promptfoo's provider `llama` (src/providers/llama.ts)."""
REQUESTS = [
    (CHAT, DIFY), (CHAT, LM_EVAL), (CHAT, LANGCHAIN_JS), (CHAT, JAN), (CHAT, AIDER), (CHAT, HOSTED_VLLM),
    (RESPONSES, LANGCHAIN_JS_RESPONSE), (COMPLETIONS, PROMPTFOO), ("/completion", PROMPTFOO_LLAMA),
]  # fmt: skip


async def test_the_requests_of_frameworks_are_answered(caller: ServedQueue) -> None:
    async with http_client(caller) as http:
        answers = [await http.post(path, json={"model": caller.queue, **body}) for path, body in REQUESTS]
    assert [answer.text for answer in answers if answer.status_code != 200] == []
    assert [answer.text.rstrip().endswith("data: [DONE]") for answer in answers] == [
        bool(body.get("stream")) for _, body in REQUESTS
    ]


async def test_an_answer_calls_a_function_in_the_form_of_the_request(caller: ServedQueue) -> None:
    """promptfoo, and Dify with the type `function_call`, send functions in place of tools."""
    body = {"model": caller.queue, "messages": [HELLO], "functions": [WEATHER], "max_tokens": 300}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    written = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    by_itself = {**body, "lark": f"start: {json.dumps(written * 2)}"}
    async with http_client(caller) as http:
        whole = (await http.post(CHAT, json=by_itself)).json()["choices"][0]
        demanded = (await http.post(CHAT, json={**body, "function_call": {"name": "weather"}})).json()["choices"][0]
        text = (await http.post(CHAT, json={**by_itself, "stream": True})).text
        messages = [HELLO, whole["message"], {"role": "function", "name": "weather", "content": "20"}]
        verbose = {**body, "messages": messages, "function_call": "none", "max_tokens": 1, "verbose": True}
        rendered = (await http.post(CHAT, json=verbose)).json()["__verbose"]["prompt"]
    call = {"name": "weather", "arguments": ARGUMENTS}
    assert whole["message"] == {"role": "assistant", "content": None, "function_call": call}
    assert demanded["message"]["function_call"]["name"] == "weather"
    assert json.loads(demanded["message"]["function_call"]["arguments"])["unit"] in ("C", "F")
    assert whole["finish_reason"] == demanded["finish_reason"] == "function_call"
    chunks = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert deltas[0] == {"name": "weather", "arguments": ""}
    assert "".join(delta["arguments"] for delta in deltas) == ARGUMENTS
    assert chunks[-1]["finish_reason"] == "function_call"
    assert '"weather"' in rendered.partition("<tool_call>")[2]
    assert "<|im_start|>tool\n20<|im_end|>" in rendered


async def test_documents_of_content_parts_are_ranked(reranker: ServedQueue) -> None:
    """Dify sends documents in this form to a reranking model that also accepts images."""
    documents = [{"content": [{"type": "text", "text": text}]} for text in ("a", "b", "c")]
    async with http_client(reranker) as http:
        rankings = [
            await http.post("/v1/rerank", json={"model": reranker.queue, "query": "b", "documents": each, "top_n": 3})
            for each in (documents, ["a", "b", "c"])
        ]
    first, second = [answer.json()["results"] for answer in rankings]
    assert [(each["index"], each["relevance_score"]) for each in first] == [
        (each["index"], pytest.approx(each["relevance_score"], abs=1e-3)) for each in second
    ]
