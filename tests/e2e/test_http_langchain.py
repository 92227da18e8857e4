"""`llamaq serve` in front of a real worker, with LangChain's client for OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest
from pydantic import BaseModel, ConfigDict
from tests.support.http_server import serving_http
from tests.support.lazy_import import lazy_import
from tests.support.readme import block

from llamaq.producer import Client

if TYPE_CHECKING:
    import langchain_openai
    from tests.e2e.conftest import ServedQueue
else:
    langchain_openai = lazy_import("langchain_openai")


class Weather(BaseModel):
    """The weather."""

    model_config = ConfigDict(extra="forbid")  # a model with random weights would add fields without end

    unit: Literal["C", "F"]


@asynccontextmanager
async def served_model(served: ServedQueue, **options: Any) -> AsyncIterator[langchain_openai.ChatOpenAI]:
    # The connections of LangChain's own HTTP client are never closed.
    async with serving_http(served.url, served.queue) as url, httpx.AsyncClient(timeout=60) as http:
        yield langchain_openai.ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model=served.queue, max_retries=0, http_async_client=http, **options
        )


async def test_a_chat_is_answered_streamed_or_not(demo: ServedQueue, client: Client) -> None:
    expected = client.chat([{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0)
    async with served_model(demo, temperature=0, max_tokens=8) as model:
        answer = await model.ainvoke("Hello")
        chunks = [chunk async for chunk in model.astream("Hello", stream_usage=True)]
    assert answer.content == "".join(str(chunk.content) for chunk in chunks) == expected.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 8
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8


async def test_the_example_of_the_readme_prints_a_story(demo: ServedQueue, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving_http(demo.url, demo.queue) as url:
        example = block("langchain").replace("http://localhost:8080", url).replace('"default"', repr(demo.queue))
        names: dict[str, Any] = {}
        await asyncio.to_thread(exec, compile(example, "README.md, langchain", "exec"), names)
        names["model"].root_client.close()
    assert len(capsys.readouterr().out) > 40


@pytest.mark.parametrize("use_responses_api", [False, True])
async def test_tools_are_called_and_their_results_answered(caller: ServedQueue, use_responses_api: bool) -> None:
    options: Any = {"use_responses_api": use_responses_api, "max_tokens": 300, "reasoning_effort": "none"}
    async with served_model(caller, **options) as model:
        bound = model.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)
        answer = await bound.ainvoke("Hello")
        streamed: Any = None
        async for chunk in bound.astream("Hello"):
            streamed = chunk if streamed is None else streamed + chunk
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "20"}
        again = await bound.ainvoke([("user", "Hello"), answer, result])
        structured = await model.with_structured_output(Weather).ainvoke("Hello")
    for each in (answer, streamed, again):
        (call,) = each.tool_calls
        assert call["name"] == "Weather"
        assert call["args"]["unit"] in ("C", "F")
    assert isinstance(structured, Weather)
