"""`llamaq generate` and `llamaq chat` with an HTTP server instead of a queue."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.gateway.test_disconnects import emit_until_cancelled, gateway
from tests.support.command_line import failing, llamaq
from tests.support.forget_modules import forget_modules
from tests.support.http_server import serving_http

from llamaq.cli.error_report import ServerRefused
from llamaq.cli.exit_codes import EXIT_NO_ANSWER, EXIT_NO_REDIS, EXIT_USAGE
from llamaq.cli.http_answer_source import ServerAnswers
from llamaq.cli.job_commands import open_answers
from llamaq.common.errors import JobFailed, ResultTimeout
from llamaq.producer import ErrorCode, FinishReason

Run = Callable[..., Any]


@asynccontextmanager
async def served_by_http(redis_url: str, queue: str, **settings: Any) -> AsyncIterator[tuple[str, Run]]:
    """Yield the URL of a server, and a function that runs a blocking call beside it."""
    async with serving_http(redis_url, queue, **settings) as url:
        yield url, asyncio.to_thread


@pytest.fixture
def no_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting of the Redis URL names a port at which no server answers."""
    monkeypatch.setenv("LLAMAQ_REDIS_URL", "redis://127.0.0.1:1")


async def test_texts_and_chats_are_printed_as_with_a_queue(served: str, redis_url: str, no_redis: None) -> None:
    async with served_by_http(redis_url, served) as (url, run):
        assert await run(llamaq, "generate", "one two", "--server", url) == "one two \n"
        assert await run(llamaq, "chat", "hi", "--system", "be brief", "--server", f"{url}/v1/") == (
            "system: be brief\nuser: hi\n\n"
        )
        printed = await run(llamaq, "generate", "one two", "--json", "--server", url, "--queue", served)
        assert json.loads(printed)["choices"][0]["text"] == "one two "
        printed = await run(llamaq, "chat", "hi", "--json", "--server", url, "--priority", "bulk", "--seed", "3")
        assert json.loads(printed)["choices"][0]["message"]["content"] == "user: hi\n"


async def test_errors_name_the_way_out(
    served: str, redis_url: str, no_redis: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str, code: int) -> str:
        return failing(monkeypatch, capsys, "generate", "x", *arguments, code=code)

    async with served_by_http(redis_url, served) as (url, run):
        unknown = await run(error, "--server", url, "--queue", "other", code=EXIT_USAGE)
        assert "'other'" in unknown
        assert "--queue names the model" in unknown
        assert "temperature" in await run(error, "--server", url, "--temperature", "-1", code=EXIT_USAGE)
        assert "no endpoint" in await run(error, "--server", f"{url}/x", code=EXIT_USAGE)
        both = await run(error, "--server", url, "--redis-url", redis_url, code=EXIT_USAGE)
        assert "leave out --redis-url" in both
        assert "--require-worker" in await run(error, "--server", url, "--require-worker", code=EXIT_USAGE)
    assert "such as http://localhost:8080" in error("--server", "localhost:8080", code=EXIT_USAGE)
    assert f"{url} does not answer" in error("--server", url, code=EXIT_NO_REDIS)
    async with served_by_http(redis_url, served, require_key=True) as (url, run):
        assert "--api-key (LLAMAQ_API_KEY)" in await run(error, "--server", url, code=EXIT_USAGE)
    async with served_by_http(redis_url, f"{served}-idle", wait_for_worker=False) as (url, run):
        await run(error, "--server", url, code=EXIT_NO_ANSWER)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate", "x", "--idempotency-key", "schl\u00fcssel"], "--idempotency-key: a key has only printable"),
        (["generate", "x", "--idempotency-key", "a\nb"], "--idempotency-key: a key has only printable"),
        (["generate", "x", "--api-key", "schl\u00fcssel"], "--api-key (LLAMAQ_API_KEY): a key has only printable"),
        (["generate", "h\udcff"], "prompt: the text is not valid Unicode"),
        (["chat", "h\udcff", "--json"], "messages: the text is not valid Unicode"),
        (["generate", "x", "--temperature", "nan"], "temperature: Input should be a finite number"),
        (["chat", "x", "--temperature", "inf", "--json"], "temperature: Input should be a finite number"),
        (["generate", "x", "--metadata", '{"a": NaN}'], "metadata.a: JSON has no nan"),
    ],
)
def test_values_that_http_cannot_send_are_refused_by_name(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = failing(monkeypatch, capsys, *arguments, "--server", "http://127.0.0.1:1", code=EXIT_USAGE)
    assert complaint in error


@pytest.mark.parametrize("wait_s", ["inf", "1e300"])
def test_a_wait_may_be_longer_than_sockets_can_wait(
    wait_s: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("generate", "x", "--server", "http://127.0.0.1:1", "--wait-s", wait_s)
    assert "does not answer" in failing(monkeypatch, capsys, *arguments, code=EXIT_NO_REDIS)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HTTP_PROXY", "bogus://x"), ("HTTP_PROXY", "http://a:b:c"), ("SSL_CERT_FILE", "/no/such/file")],
)
def test_a_variable_that_httpx_cannot_use_is_an_error_in_one_line(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    error = failing(monkeypatch, capsys, "generate", "x", "--server", "http://127.0.0.1:1", code=EXIT_USAGE)
    assert variable in error


def test_an_error_does_not_show_the_password_of_the_url(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for url, code in (("http://user:secret@127.0.0.1:1", EXIT_NO_REDIS), ("ftp://user:secret@127.0.0.1", EXIT_USAGE)):
        error = failing(monkeypatch, capsys, "generate", "x", "--server", url, code=code)
        assert "user:***@127.0.0.1" in error


def test_the_wait_is_that_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def timeout_s(wait_s: float | None) -> float:
        with open_answers(None, None, wait_s, None, "http://127.0.0.1:1", None) as answers:
            assert isinstance(answers, ServerAnswers)
            return answers._timeout_s

    assert timeout_s(None) == 300
    monkeypatch.setenv("LLAMAQ_TIMEOUT_S", "7")
    assert (timeout_s(None), timeout_s(3)) == (7, 3)


async def test_leaving_a_stream_cancels_its_job(redis_url: str, queue: str) -> None:
    async with gateway(redis_url, queue) as (url, worker, _):

        def read_one_piece() -> str:
            with ServerAnswers(url, None, None, 60) as answers, answers.stream_chat([CHAT], {}) as stream:
                return next(iter(stream))

        reading = asyncio.create_task(asyncio.to_thread(read_one_piece))
        attempt = await worker.start_next()
        await emit_until_cancelled(attempt)
        assert await reading == "word "


CHAT = {"role": "user", "content": "hi"}


def answers_with(*lines: str, status: int = 200, **options: Any) -> ServerAnswers:
    """Return the answers of a server that gives every request the same answer."""
    answers = ServerAnswers("http://test", None, None, options.get("timeout_s", 60))
    body = "".join(f"{line}\n\n" for line in lines).encode()

    def answer(_: httpx.Request) -> httpx.Response:
        headers = {"content-type": options.get("content_type", "text/event-stream")}
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))  # the body is not read yet

    answers._http = httpx.Client(base_url="http://test/v1/", transport=httpx.MockTransport(answer))
    return answers


def chunk(delta: dict[str, Any], reason: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": reason}]})


def test_the_end_of_a_stream_tells_why_it_ended() -> None:
    stream = answers_with(chunk({"content": "a"}), chunk({}, "length"), "data: [DONE]").stream_chat([CHAT], {})
    assert list(stream) == ["a"]
    assert stream.finish_reason() is FinishReason.LENGTH


def test_only_line_feeds_end_the_lines_of_a_stream() -> None:
    text = "a\u2028b\x85c"
    event = json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}, ensure_ascii=False)
    assert list(answers_with(f"data: {event}\r", "data: [DONE]").stream_chat([CHAT], {})) == [text]


def test_the_url_of_a_web_page_is_named_as_the_reason() -> None:
    stream = answers_with("<html>hello</html>", content_type="text/html").stream_chat([CHAT], {})
    with pytest.raises(ServerRefused, match="not a stream: --server needs the URL of a server of the OpenAI API"):
        list(stream)


def test_a_cut_stream_an_error_in_it_and_a_long_silence_are_errors() -> None:
    with pytest.raises(Exception, match="closed the connection before the end"):
        list(answers_with(chunk({"content": "a"})).stream_chat([CHAT], {}))
    with pytest.raises(ResultTimeout):
        list(answers_with(": queued, 1 ahead", timeout_s=0).stream_chat([CHAT], {}))


@pytest.mark.parametrize(
    "error",
    [
        {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"},
        {"message": "too long", "type": "exceed_context_size_error", "code": 400},  # of llama-server
        {"message": "too long", "code": "prompt_too_long"},
    ],
)
def test_a_prompt_that_is_too_long_has_the_error_of_a_job_in_an_answer_and_in_a_stream(error: dict[str, Any]) -> None:
    body = json.dumps({"error": error})
    for answers in (answers_with(body, status=400), answers_with(f"data: {body}")):
        with pytest.raises(JobFailed) as caught:
            list(answers.stream_chat([CHAT], {}))
        assert caught.value.code == ErrorCode.PROMPT_TOO_LONG


@pytest.mark.parametrize("code", [["too_long"], {"name": "too_long"}, 7, None, "too_long"])
def test_an_error_of_another_server_may_have_any_code(code: Any) -> None:
    body = json.dumps({"error": {"message": "too long", "code": code}})
    with pytest.raises(ServerRefused, match="too long"):
        answers_with(body, status=400).whole_text("a", {})


def test_an_answer_that_is_no_json_names_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="--server needs the URL"):
        answers_with("<html>").whole_text("a", {})
    for status in (307, 502):
        with pytest.raises(Exception, match=f"status {status}"):
            answers_with("<html>", status=status).stream_text("a", {})


def test_without_httpx_the_option_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_modules(monkeypatch, "llamaq.cli.http_answer_source")
    monkeypatch.setitem(sys.modules, "httpx", None)
    error = failing(monkeypatch, capsys, "generate", "x", "--server", "http://localhost:8080")
    assert "pip install 'llamaq[http]'" in error
