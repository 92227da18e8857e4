"""Reports an error of the `llamaq` command: its line and its exit code. Defines the errors of `--server`."""

from __future__ import annotations

from http import HTTPStatus
from ssl import SSLError

from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.cli.columns import visible
from llamaq.cli.exit_codes import EXIT_FAILED, EXIT_NO_ANSWER, EXIT_NO_REDIS, EXIT_USAGE
from llamaq.common.errors import (
    BulkRunRefused,
    EmbeddedRedisError,
    InvalidRequest,
    InvalidSettings,
    LlamaqError,
    NotDurable,
    NoWorker,
    OtherKindOfQueue,
    QueueDraining,
    QueueFull,
    RedisFull,
    ResultTimeout,
)
from llamaq.common.logging_setup import mask_passwords
from llamaq.common.redis.connect import NotTheMaster

_TEMPORARY = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}


class ServerUnreachable(LlamaqError):
    """The HTTP server does not answer, or closes the connection before the end."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class ServerRefused(LlamaqError):
    """The HTTP server refuses a request.

    Attributes:
        http_status: The status of its answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.http_status = HTTPStatus(status) if status in set(HTTPStatus) else HTTPStatus.BAD_GATEWAY

    @property
    def exit_code(self) -> int:
        """The exit code of a command that this error ended."""
        if self.http_status in _TEMPORARY:
            return EXIT_NO_ANSWER
        return EXIT_USAGE if self.http_status < HTTPStatus.INTERNAL_SERVER_ERROR else EXIT_FAILED


_CODES: dict[type[LlamaqError], int] = {
    InvalidRequest: EXIT_USAGE,
    InvalidSettings: EXIT_USAGE,
    OtherKindOfQueue: EXIT_USAGE,
    BulkRunRefused: EXIT_USAGE,
    EmbeddedRedisError: EXIT_NO_REDIS,
    RedisFull: EXIT_NO_REDIS,
    NotDurable: EXIT_NO_REDIS,
    ServerUnreachable: EXIT_NO_REDIS,
    NoWorker: EXIT_NO_ANSWER,
    QueueFull: EXIT_NO_ANSWER,
    QueueDraining: EXIT_NO_ANSWER,
    ResultTimeout: EXIT_NO_ANSWER,
}


def exit_code_of(error: LlamaqError | RedisError | OSError | UnicodeError) -> int:
    """Return the exit code of a command that this error ended."""
    if isinstance(error, RedisError):
        return EXIT_NO_REDIS
    if isinstance(error, ServerRefused):
        return error.exit_code
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), EXIT_FAILED)


def explain(error: LlamaqError | RedisError | OSError | UnicodeError) -> str:
    """Return an error as one line."""
    line = visible(mask_passwords(" ".join(str(error).split()))) or type(error).__name__
    if not isinstance(error, RedisError):
        return line
    if isinstance(error, NotTheMaster):
        return "this Redis is a replica, which refuses to write: name the master with --redis-url (LLAMAQ_REDIS_URL)"
    is_unreachable = isinstance(error, RedisConnectionError | RedisTimeoutError)
    if is_unreachable and not isinstance(error, AuthenticationError):
        if _is_of_tls(error):
            return f"Redis: no TLS connection: {line}"
        way_out = "Start one: llamaq up. Or name one: --redis-url (LLAMAQ_REDIS_URL)"
        return f"Redis does not answer: {line.rstrip('.')}. {way_out}"
    return f"Redis: {line}"


def _is_of_tls(error: BaseException | None) -> bool:
    """Return whether an error was caused by an error of TLS. In a cluster, there are other errors between the two."""
    while error is not None and not isinstance(error, SSLError):
        error = error.__cause__ or error.__context__
    return error is not None
