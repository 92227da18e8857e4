"""The answers of an HTTP server: `llamaq serve`, or another server of the OpenAI API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any, Self

import httpx

from llamaq.cli.answer_sources import AnswerStream, Messages, Options, WholeAnswer
from llamaq.cli.error_report import ServerRefused, ServerUnreachable
from llamaq.cli.views import notice
from llamaq.common.errors import ErrorCode, InvalidRequest, JobFailed, LlamaqError, ResultTimeout
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import JobParams, Priority
from llamaq.producer import FinishReason
from llamaq.producer.openai_format.response_body import CONTEXT_EXCEEDED_TYPE, CONTEXT_LENGTH_EXCEEDED

CONNECT_TIMEOUT_S = 10.0
MAX_TIMEOUT_S = 2e6
"""Sockets accept up to 2**31 ms."""
CHAT = "chat/completions"
TEXT = "completions"
_WAYS_OUT = {
    "invalid_api_key": "Give one: --api-key (LLAMAQ_API_KEY)",
    "model_not_found": "--queue names the model",
}
"""For each code of an error: what the user of the command can do."""


def _is_http_url(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in {"http", "https"} and bool(parsed.host) and (parsed.port or 1) < 2**16


def _check_key(option: str, key: str | None) -> None:
    """Raise `InvalidRequest` if no header can have this key."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InvalidRequest(f"{option}: a key has only printable ASCII characters")


class ServerAnswers:
    """The answers of a server."""

    def __init__(self, url: str, api_key: str | None, model: str | None, timeout_s: float) -> None:
        """Connect to a server at the first request.

        Args:
            url: The URL of the server, with or without `/v1`.
            api_key: The key that the server requires, or None.
            model: The `model` of the requests. None: the server decides.
            timeout_s: Longest wait for an answer, or for its next piece.

        Raises:
            InvalidRequest: `url` is not an HTTP URL, no header can have this key, or the environment is not valid.
        """
        if not _is_http_url(url):
            raise InvalidRequest(f"--server: {url[:100]!r} is not a URL such as http://localhost:8080")
        _check_key("--api-key (LLAMAQ_API_KEY)", api_key)
        self._model = {} if model is None else {"model": model}
        self._timeout_s = timeout_s
        try:
            self._http = httpx.Client(
                base_url=url.rstrip("/").removesuffix("/v1") + "/v1/",
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(min(timeout_s, MAX_TIMEOUT_S), connect=CONNECT_TIMEOUT_S),
            )
        except (ValueError, OSError, ImportError, httpx.InvalidURL) as exc:
            raise InvalidRequest(f"--server: SSL_CERT_FILE, HTTP_PROXY or a similar variable: {exc}") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def stream_text(self, prompt: str, options: Options) -> AnswerStream:
        """Begin to continue a text."""
        return ServerStream(self._http, TEXT, *self._request(TEXT, options, prompt=prompt), self._timeout_s)

    def stream_chat(self, messages: Messages, options: Options) -> AnswerStream:
        """Begin to answer a chat."""
        return ServerStream(self._http, CHAT, *self._request(CHAT, options, messages=messages), self._timeout_s)

    def whole_text(self, prompt: str, options: Options) -> WholeAnswer:
        """Continue a text."""
        return self._whole(TEXT, *self._request(TEXT, options, prompt=prompt))

    def whole_chat(self, messages: Messages, options: Options) -> WholeAnswer:
        """Answer a chat."""
        return self._whole(CHAT, *self._request(CHAT, options, messages=messages))

    def _request(self, endpoint: str, options: Options, **prompt: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the body and the headers of a request. Servers accept job options under the names of llamaq."""
        body = {"max_tokens": JobParams.model_fields["max_tokens"].default, **self._model, **prompt, **options}
        _check_key("--idempotency-key", key := body.pop("idempotency_key", None))
        codec.build_model(JobParams, options)
        for name, value in body.items():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as exc:
                raise InvalidRequest(f"{name}: the text is not valid Unicode") from exc
        if (priority := body.pop("priority", None)) is not None:
            body["service_tier"] = "flex" if priority is Priority.BULK else "default"
        if endpoint == CHAT and "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        return body, {} if key is None else {"Idempotency-Key": key}

    def _whole(self, endpoint: str, body: dict[str, Any], headers: dict[str, str]) -> WholeAnswer:
        try:
            answer = self._http.post(endpoint, json=body, headers=headers)
        except httpx.HTTPError as exc:
            raise _unreachable(exc, self._http, self._timeout_s) from exc
        _check(answer)
        found = _decode(answer.text)
        return WholeAnswer(_text_of(found), json.dumps(found), _reason_of(found))


class ServerStream:
    """A streamed answer of a server. Leaving its context closes the connection, and the server cancels the job."""

    def __init__(
        self, http: httpx.Client, endpoint: str, body: dict[str, Any], headers: dict[str, str], timeout_s: float
    ) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._reason: FinishReason | None = None
        self._open = ExitStack()
        try:
            self._answer = self._open.enter_context(
                http.stream("POST", endpoint, json={**body, "stream": True}, headers=headers)
            )
            if not self._answer.is_success:
                self._answer.read()
        except httpx.HTTPError as exc:
            self._open.close()
            raise _unreachable(exc, http, timeout_s) from exc
        try:
            _check(self._answer)
        except LlamaqError:
            self._open.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces of the text. Comments of the server do not extend the wait for a piece."""
        waiting_since_s, is_told = time.monotonic(), False
        try:
            for line in _lines_of(self._answer):
                if line.startswith("data:") and line.removeprefix("data:").strip() != "[DONE]":
                    yield from self._read(_decode(line.removeprefix("data:")))
                    waiting_since_s = time.monotonic()
                elif line.startswith(":"):
                    if not is_told and "queued" in line:
                        notice(f"the request waits: {line[1:].strip()}")
                        is_told = True
                    if time.monotonic() - waiting_since_s > self._timeout_s:
                        raise _too_late(self._timeout_s)
        except httpx.HTTPError as exc:
            raise _unreachable(exc, self._http, self._timeout_s) from exc
        if self._reason is None:
            if "event-stream" not in self._answer.headers.get("content-type", "event-stream"):
                raise _no_server_of_the_api("not a stream")
            raise ServerUnreachable(f"the server at {self._http.base_url} closed the connection before the end")

    def finish_reason(self) -> FinishReason | None:
        """Return why the answer has ended."""
        return self._reason

    def _read(self, event: dict[str, Any]) -> Iterator[str]:
        if "error" in event:
            raise _error_of(event, HTTPStatus.BAD_GATEWAY)
        if text := _text_of(event):
            yield text
        self._reason = _reason_of(event) or self._reason


def _lines_of(answer: httpx.Response) -> Iterator[str]:
    """Yield the lines of a stream. `iter_lines` would also end a line at U+2028, which a text may have."""
    rest = ""
    for part in answer.iter_text():
        *lines, rest = (rest + part).split("\n")
        yield from lines


def _check(answer: httpx.Response) -> None:
    """Raise the error if the status of the answer is that of an error."""
    if not answer.is_success:
        raise _error_of(_decode(answer.text, or_empty=True), answer.status_code)


def _error_of(body: dict[str, Any], status: int) -> LlamaqError:
    found = body.get("error")
    error = found if isinstance(found, dict) else {}
    message, code = str(error.get("message") or f"the server answered with the status {status}"), error.get("code")
    if code == CONTEXT_LENGTH_EXCEEDED or error.get("type") == CONTEXT_EXCEEDED_TYPE:  # the latter: llama-server
        return JobFailed(ErrorCode.PROMPT_TOO_LONG, message)
    if isinstance(code, str) and code in set(ErrorCode):  # another server may send anything
        return JobFailed(code, message)
    way_out = _WAYS_OUT.get(str(code))
    return ServerRefused(status, f"{message.rstrip('.')}. {way_out}" if way_out else message)


def _unreachable(error: httpx.HTTPError, http: httpx.Client, timeout_s: float) -> LlamaqError:
    if isinstance(error, httpx.ReadTimeout):
        return _too_late(timeout_s)
    url = str(http.base_url).removesuffix("/v1/")
    way_out = "Start one: llamaq serve. Or name another one: --server"
    return ServerUnreachable(f"the server {url} does not answer: {str(error).rstrip('.')}. {way_out}")


def _too_late(timeout_s: float) -> LlamaqError:
    return ResultTimeout(f"no text within {timeout_s:g} s; the request was cancelled. --wait-s sets a longer time")


def _no_server_of_the_api(what: str) -> ServerRefused:
    message = f"the answer is {what}: --server needs the URL of a server of the OpenAI API"
    return ServerRefused(HTTPStatus.BAD_GATEWAY, message)


def _decode(text: str, *, or_empty: bool = False) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as exc:
        if or_empty:
            return {}
        raise _no_server_of_the_api("not JSON") from exc
    return found if isinstance(found, dict) else {}


def _choice_of(found: dict[str, Any]) -> dict[str, Any]:
    choices = found.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _text_of(found: dict[str, Any]) -> str:
    """Return the text of an answer or of a chunk. Calls of tools are shown as JSON."""
    choice = _choice_of(found)
    part = choice.get("message") or choice.get("delta") or choice
    calls = part.get("tool_calls")
    return str(part.get("content") or part.get("text") or "") + (json.dumps(calls) if calls else "")


def _reason_of(found: dict[str, Any]) -> FinishReason | None:
    reason = _choice_of(found).get("finish_reason")
    if reason is None:
        return None
    return FinishReason.LENGTH if reason == "length" else FinishReason.STOP
