"""Turns errors into responses with the fields that clients of OpenAI's API and of llama-server read."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from redis.exceptions import RedisError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from llamaq.common.errors import (
    ErrorCode,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFound,
    LlamaqError,
    NoWorker,
    QueueDraining,
    QueueFull,
    RedisFull,
    SlotCommandRefused,
    WorkerEnded,
)
from llamaq.common.redis.write_refusals import is_full
from llamaq.producer.openai_format.response_body import CONTEXT_EXCEEDED_TYPE, CONTEXT_LENGTH_EXCEEDED, job_error_code

RETRY_AFTER_S = 5
"""The value of `Retry-After` if no better value is known."""
SHOULD_RETRY = "x-should-retry"
NOT_REPEATED = frozenset({"idempotency_conflict", ErrorCode.POISON})
"""Codes of errors after which clients must not repeat the request, although their status allows it. A repetition of a
request whose job was `poison` would be a new job, which would crash as many workers again."""

LLAMA_SERVER_PATHS = frozenset({"/completion", "/completions", "/embedding", "/embeddings"})
"""Paths of llama-server's own endpoints that compute a prompt. Their errors keep the code of the job."""

TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.NOT_IMPLEMENTED: "not_supported_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable_error",
}
"""The `type` of errors by their status, as llama-server names it. Other statuses: see `type_of`."""
MESSAGE_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""The `type` of errors by their status, as Anthropic names it."""


_OF_PATHS: Mapping[int, str] = {
    HTTPStatus.NOT_FOUND: "there is no endpoint with this path; GET /openapi.json describes all",
    HTTPStatus.METHOD_NOT_ALLOWED: "this endpoint does not accept this method; GET /openapi.json describes all",
}
"""The messages of Starlette's errors, which only name the status."""


class RequestRefused(LlamaqError):
    """The server refuses a request.

    Attributes:
        http_status: The status of the response.
        code: Kind of the error, for programs.
        param: Name of the field that is wrong. None: no single field is.
        headers: Headers of the response.
        details: Further fields of the object `error`.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.details = dict(details or {})


def invalid(message: str, param: str | None = None) -> RequestRefused:
    """Return the error of a request that the caller can correct."""
    return RequestRefused(HTTPStatus.BAD_REQUEST, message, param=param)


def not_found(message: str) -> RequestRefused:
    """Return the error of a request for something that does not exist."""
    return RequestRefused(HTTPStatus.NOT_FOUND, message, code="not_found")


def status_of(exc: Exception) -> HTTPStatus:
    """Return the status of the response to an error."""
    if isinstance(exc, QueueFull):
        return HTTPStatus.TOO_MANY_REQUESTS
    if isinstance(exc, SlotCommandRefused) and not isinstance(exc, WorkerEnded):
        return HTTPStatus.BAD_REQUEST
    if isinstance(exc, LlamaqError):
        return exc.http_status
    if isinstance(exc, RedisError | OSError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(exc, HTTPException):
        return HTTPStatus(exc.status_code)
    return HTTPStatus.INTERNAL_SERVER_ERROR


def type_of(status: HTTPStatus, code: str | None = None) -> str:
    """Return the `type` of an error."""
    if code in (ErrorCode.PROMPT_TOO_LONG, CONTEXT_LENGTH_EXCEEDED):
        return CONTEXT_EXCEEDED_TYPE
    return TYPES.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error")


def code_of(exc: Exception) -> str | None:
    """Return the `code` of an error, for programs."""
    if isinstance(exc, JobFailed):
        return job_error_code(exc)
    if isinstance(exc, RequestRefused):
        return exc.code
    if is_full(exc):
        return "redis_full"
    kinds = {
        QueueFull: "queue_full",
        QueueDraining: "queue_draining",
        NoWorker: "no_worker",
        WorkerEnded: "worker_ended",
        RedisFull: "redis_full",
        IdempotencyConflict: "idempotency_conflict",
        JobCancelled: "cancelled",
        JobNotFound: "not_found",
    }
    return kinds.get(type(exc))


def headers_of(exc: Exception) -> dict[str, str]:
    """Return the headers of the response to an error. A client may try again after `Retry-After` seconds.

    With `x-should-retry`, the clients of OpenAI and Anthropic do not repeat a request that would fail again. Without
    it, they repeat all requests with the status 409 or 5xx.
    """
    if isinstance(exc, QueueFull):
        return {"Retry-After": str(exc.retry_after_s)}
    headers = dict(getattr(exc, "headers", None) or {})
    if status_of(exc) is HTTPStatus.SERVICE_UNAVAILABLE:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    if status_of(exc) is HTTPStatus.NOT_IMPLEMENTED or code_of(exc) in NOT_REPEATED:
        headers[SHOULD_RETRY] = "false"
    return headers


def message_of(exc: Exception) -> str:
    """Return an error in words. The texts of Redis errors are left out, because they contain host names of the
    operator.
    """
    if is_full(exc):
        return "Redis is full; try again later, or give it more memory (maxmemory)"
    if isinstance(exc, RedisError | OSError) and not isinstance(exc, LlamaqError):
        return "Redis cannot be reached; try again later"
    if isinstance(exc, JobFailed):
        return exc.message
    if isinstance(exc, HTTPException):
        return _OF_PATHS.get(exc.status_code, exc.detail)
    return str(exc) if isinstance(exc, LlamaqError) else "a defect of the server: its log has the details"


def param_of(exc: Exception) -> str | None:
    """Return the field that an error names, if the message begins with it."""
    if isinstance(exc, RequestRefused):
        return exc.param
    if isinstance(exc, InvalidRequest):
        name, separator, _ = str(exc).partition(":")
        return name if separator and name.replace(".", "").replace("_", "").isalnum() else None
    return None


def error_fields(exc: Exception) -> dict[str, Any]:
    """Return the object `error` of a response."""
    status, code = status_of(exc), code_of(exc)
    details = exc.details if isinstance(exc, RequestRefused) else {}
    return {"message": message_of(exc), "type": type_of(status, code), "code": code, "param": param_of(exc), **details}


def message_error(exc: Exception, request_id: str | None) -> dict[str, Any]:
    """Return an error in the form of Anthropic's API, with the id of the request."""
    status = status_of(exc)
    kind = MESSAGE_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message_of(exc)}, "request_id": request_id}


def is_for_anthropic(scope: Scope) -> bool:
    """Return whether a request is for Anthropic's API. Both APIs have the paths of models."""
    path: str = scope["path"]
    return path.startswith("/v1/messages") or (
        path.startswith("/v1/models") and "anthropic-version" in Headers(scope=scope)
    )


def error_response(exc: Exception, scope: Scope) -> Response:
    """Return the response to the error of a request, in the form of the API that it is for."""
    if is_for_anthropic(scope):
        body = message_error(exc, scope.get("state", {}).get("request_id"))
    elif scope["path"] in LLAMA_SERVER_PATHS and isinstance(exc, JobFailed):
        body = {"error": {**error_fields(exc), "code": exc.code}}
    else:
        body = {"error": error_fields(exc)}
    return JSONResponse(body, status_of(exc), headers_of(exc))


async def respond_to_error(request: Request, exc: Exception) -> Response:
    """Return the response to an error, as a handler of Starlette."""
    return error_response(exc, request.scope)
