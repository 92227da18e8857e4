"""`llamaq serve` in front of a real worker, with LiteLLM as the client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict
from tests.support.http_server import serving_http
from tests.support.lazy_import import lazy_import

from llamaq.producer import Client

if TYPE_CHECKING:
    import litellm
    from tests.e2e.conftest import ServedQueue
else:
    litellm = lazy_import("litellm")

pytestmark = pytest.mark.filterwarnings("ignore:Item 'summary':UserWarning")  # of LiteLLM's own types

HELLO: Any = [{"role": "user", "content": "Hello"}]


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a model with random weights would add fields without end

    unit: Literal["C", "F"]


@pytest.fixture(autouse=True)
def stay_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import downloads a list of prices


@asynccontextmanager
async def served_options(served: ServedQueue, **options: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the arguments of a call to a server. LiteLLM's connections are closed at the end."""
    async with serving_http(served.url, served.queue) as url:
        given = {"model": f"openai/{served.queue}", "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
        # For requests with tools, LiteLLM imports the package mcp, which it does not require.
        yield {**given, "messages": HELLO, "_skip_mcp_handler": True, **options}
        await litellm.close_litellm_async_clients()  # type: ignore[attr-defined,no-untyped-call]


async def test_a_chat_is_answered_streamed_or_not(demo: ServedQueue, client: Client) -> None:
    expected = client.chat(HELLO, max_tokens=8, temperature=0)
    async with served_options(demo, max_tokens=8, temperature=0) as options:
        answer: Any = await litellm.acompletion(**options)
        stream: Any = await litellm.acompletion(**options, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert answer.choices[0].message.content == "".join(texts) == expected.text
    assert answer.usage.completion_tokens == 8


async def test_tools_are_called_and_objects_have_the_form_of_a_class(caller: ServedQueue) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
    async with served_options(caller, max_tokens=300) as options:
        options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
        forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        answer: Any = await litellm.acompletion(**options, **forced)
        chunks: Any = [chunk async for chunk in await litellm.acompletion(**options, **forced, stream=True)]
        parsed: Any = await litellm.acompletion(**options, response_format=Weather)
    streamed: Any = litellm.stream_chunk_builder(chunks)
    for each in (answer, streamed):
        (call,) = each.choices[0].message.tool_calls
        assert call.function.name == "weather"
        Weather(**json.loads(call.function.arguments))
        assert each.choices[0].finish_reason == "tool_calls"
    Weather.model_validate_json(parsed.choices[0].message.content)
