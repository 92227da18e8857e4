"""Anthropic's messages API of `llamaq serve` in front of a real worker, with the anthropic package as the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.http_server import serving_http
from tests.support.lazy_import import lazy_import

from llamaq.producer import Client

if TYPE_CHECKING:
    import anthropic
    from tests.e2e.conftest import ServedQueue
else:
    anthropic = lazy_import("anthropic")

BLOCKS: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
SAME: Any = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello"}]
OPTIONS: Any = {"max_tokens": 8, "extra_body": {"temperature": 0}, "system": "You are kind.", "messages": BLOCKS}


async def test_messages_have_the_text_of_the_python_client_streamed_or_not(demo: ServedQueue, client: Client) -> None:
    expected = client.chat(SAME, max_tokens=8, temperature=0)
    async with (
        serving_http(demo.url, demo.queue) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api,
    ):
        message = await api.messages.create(model=demo.queue, **OPTIONS)
        async with api.messages.stream(model=demo.queue, **OPTIONS) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        stopped = await api.messages.create(model=demo.queue, stop_sequences=[expected.text[3:5]], **OPTIONS)
        counted = await api.messages.count_tokens(model=demo.queue, messages=BLOCKS, system="You are kind.")
        with pytest.raises(anthropic.NotFoundError) as missing:
            await api.messages.create(model="no-such-model", **OPTIONS)
        with pytest.raises(anthropic.BadRequestError, match="llamaq does not support it"):
            await api.messages.create(model=demo.queue, tools=[{"name": "f", "input_schema": {}}], **OPTIONS)
    block = message.content[0]
    assert block.type == "text"
    assert block.text == expected.text == "".join(texts)
    assert streamed.content[0].type == "text"
    assert streamed.content[0].text == expected.text
    assert (message.stop_reason, streamed.stop_reason) == ("max_tokens", "max_tokens")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", expected.text[3:5])
    assert message.usage.output_tokens == streamed.usage.output_tokens == 8
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert counted.input_tokens == expected.stats.prompt_tokens
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]  # any JSON


async def test_a_server_may_accept_models_that_it_does_not_know(demo: ServedQueue) -> None:
    async with (
        serving_http(demo.url, demo.queue, accept_any_model=True) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api,
    ):
        assert (await api.messages.create(model="claude-x", **OPTIONS)).model == "claude-x"
